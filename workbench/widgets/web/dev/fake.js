// A stand-in for Python: it keeps a wiring, derives transfers from it, and answers the messages of the contract.

const OPS = {
  qkv: ["reads x, writes q, k and v", 88e6, 0.21e12, 1.9e-3],
  prefill_attention: ["attention of the prompts' tokens", 0, 0.9e12, 3.1e-3],
  decode_attention: ["attention of the running sequences over their KV cache", 0, 0.034e12, 24e-3],
  out_proj: ["projects the attention's output", 33.6e6, 0.14e12, 1.2e-3],
  route: ["chooses the experts of every token", 65.5e3, 0.3e9, 0.08e-3],
  experts: ["the chosen experts of every token", 2.82e9, 11.4e12, 91e-3],
  shared_experts: ["the experts that every token takes", 176e6, 0.7e12, 5.6e-3],
  combine: ["adds up what the experts wrote", 0, 0.2e9, 0.3e-3],
  gate_norm: ["an operation of this notebook", 8.2e3, 0.1e9, 0.05e-3],
};
const PRESETS = {
  vslpipe: ["MoE-Lens (VSLPipe)", [["qkv", "gpu"], ["prefill_attention", "gpu"], ["decode_attention", "cpu"], ["out_proj", "gpu"], ["route", "gpu"], ["experts", "gpu"], ["combine", "gpu"]]],
  flexgen: ["FlexGen (S4)", [["qkv", "gpu"], ["prefill_attention", "gpu"], ["decode_attention", "gpu"], ["out_proj", "gpu"], ["route", "gpu"], ["experts", "gpu"], ["combine", "gpu"]]],
  ktransformers: ["KTransformers", [["qkv", "gpu"], ["prefill_attention", "gpu"], ["decode_attention", "gpu"], ["out_proj", "gpu"], ["route", "gpu"], [[["shared_experts", "gpu"]], [["experts", "cpu"]]], ["combine", "gpu"]]],
};

const clone = (value) => structuredClone(value);

const baseOf = (name) => name.split("[")[0];

function card([name, device], options = {}) {
  const base = baseOf(name);
  const [about, weights, flops, seconds] = OPS[base];
  const set = name === base ? "all" : name.slice(base.length + 1, -1);
  const slow = device === "cpu" && name !== "decode_attention" ? 6 : 1;
  const fetchable = weights && device === "gpu";
  return {
    kind: "card", path: [], name, device, about, rows: "all", own: name === "gate_norm",
    split: name === "experts" ? ":4" : "", shared: false,
    weights, flops, seconds: seconds * slow, share: null,
    stored: !weights ? "" : device === "gpu" ? "streamed" : "resident",
    options: [
      ...(name === "experts" ? [{ name: "defer", value: 0, most: 5, label: "defer experts" }, { name: "skip", value: 0, most: 2, label: "skip experts" }] : []),
      ...(fetchable ? [{ name: "fetch", value: "streamed", choices: base === "experts" ? ["resident", "streamed", "chosen"] : ["resident", "streamed"], label: "weights" }] : []),
      ...(base === "experts" ? [{ name: "experts", value: set, choices: ["all", ":4", "~:4"], label: "which", free: true }] : []),
    ],
    ...options,
  };
}

function chainOf(steps) {
  return steps.map((step) => (typeof step[0] === "string" ? card(step) : { kind: "fork", path: [], arms: step.map(chainOf) }));
}

const first = (chain) => chain.reduce((found, each) => found ?? (each.kind === "card" ? each.device : each.kind === "fork" ? first(each.arms[0]) : null), null);
const carried = (to, next) => (next?.name === "decode_attention" ? "q@decode k v" : next?.name.startsWith("experts") ? "h gates" : to === "gpu" ? (next?.name === "out_proj" ? "attn@decode" : "routed") : "x");

// Put transfers where the device changes.
function derived(chain, device, closing) {
  const out = [];
  const cross = (to, next) => {
    if (to === device) return;
    const bytes = to === "cpu" ? 62e6 : 33e6;
    out.push({ kind: "move", path: [], target: to, carries: carried(to, next), bytes, seconds: bytes / 17e9 });
    device = to;
  };
  for (const element of chain.filter((each) => each.kind !== "move")) {
    if (element.kind === "card") {
      cross(element.device, element);
      out.push(element);
    } else {
      out.push({ ...element, arms: element.arms.filter((arm) => arm.some((each) => each.kind !== "move")).map((arm) => derived(arm, device, device)) });
      const at = out.length - 1;
      if (out[at].arms.length < 2) out.splice(at, 1, ...(out[at].arms[0] ?? []));
    }
  }
  if (closing) cross(closing, null);
  return out;
}

function number(chain, prefix = []) {
  chain.forEach((element, index) => {
    element.path = [...prefix, index];
    if (element.kind === "fork") element.arms.forEach((arm, i) => number(arm, [...element.path, i]));
  });
}

const cards = (chain) => chain.flatMap((each) => (each.kind === "card" ? [each] : each.kind === "fork" ? each.arms.flatMap(cards) : []));
const siblings = (chain, path) => (path.length === 1 ? chain : siblings(chain[path[0]].arms[path[1]], path.slice(2)));
const last = (path) => path[path.length - 1];

function shifted(chain, { path, to }) {
  const [source, target] = [siblings(chain, path), siblings(chain, to)];
  const moved = source[last(path)];
  const hole = { kind: "move" };
  source[last(path)] = hole;
  target.splice(last(to), 0, moved);
  source.splice(source.indexOf(hole), 1);
}

function settled(range) {
  const stripped = (chain) => chain.filter((each) => each.kind !== "move").map((each) => (each.kind === "fork" ? { ...each, arms: each.arms.map(stripped) } : each));
  const bare = stripped(range.chain);
  range.chain = derived(bare, first(bare) ?? "gpu", first(bare));
  number(range.chain);
  const busy = { gpu: 0, cpu: 0 };
  for (const each of cards(range.chain)) {
    const fresh = card([each.name, each.device]);
    Object.assign(each, { ...fresh, path: each.path, rows: each.rows, options: fresh.options.map((option) => each.options.find((old) => old.name === option.name) ?? option) });
    const fetch = each.options.find((option) => option.name === "fetch");
    if (fetch) each.stored = fetch.value;
    busy[each.device] += each.seconds;
  }
  const shares = cards(range.chain).some((each) => each.name === "shared_experts");
  for (const each of cards(range.chain)) {
    each.share = each.seconds / busy[each.device];
    each.shared = range.shared === true && !shares && each.name === "experts";
  }
}

function range(firstLayer, stop, steps) {
  const made = {
    first: firstLayer, stop, title: stop - firstLayer === 1 ? `layer ${firstLayer}` : `layers ${firstLayer} to ${stop - 1}`, chain: chainOf(steps),
    fetches: [
      { name: "weights", on: true, label: "all weights", why: "", bytes: 2.9e9, seconds: 0.17 },
      { name: "kv", on: false, label: "KV cache", why: "decode_attention is on the CPU and reads the cache there" },
      { name: "experts.weights", on: false, label: "experts' weights only", why: "" },
    ],
  };
  settled(made);
  return made;
}

function fault(ranges) {
  for (const [index, each] of ranges.entries()) {
    const flat = each.chain.findIndex((element) => element.kind === "card" && element.name === "decode_attention");
    const before = each.chain.slice(0, flat).some((element) => element.kind === "card" && element.name === "qkv");
    if (flat >= 0 && !before) {
      return {
        range: index, path: [flat],
        text: `${each.chain[flat].device}(decode_attention) reads q, k and v, but no stage before it writes them. Put qkv before it.`,
        mends: [{ id: 0, label: "Put qkv before it" }, { id: 1, label: "Remove decode_attention" }],
      };
    }
  }
  return null;
}

const BUILT_IN = Object.keys(OPS).filter((name) => name !== "gate_norm" && name !== "shared_experts");

// The operations that a range lacks; the number of a mend names range, operation and device.
function lacksOf(ranges) {
  return ranges.map((each, at) => {
    const there = cards(each.chain).map((one) => baseOf(one.name));
    const lacks = BUILT_IN.filter((name) => !there.includes(name));
    const mend = (op, device) => ({ id: 100 * (at + 1) + 2 * BUILT_IN.indexOf(op) + (device === "cpu"), label: `Add ${op} on the ${device.toUpperCase()}` });
    return lacks.map((op) => ({ op, mends: [mend(op, "gpu"), mend(op, "cpu")] }));
  });
}

function wiringOf(ranges, undo, redo) {
  const names = new Set(ranges.flatMap((each) => cards(each.chain).map((one) => baseOf(one.name))));
  const wrong = fault(ranges);
  return {
    ranges: clone(ranges), layers: 32, fault: wrong, undo, redo, stale: wrong !== null, refused: "",
    times: wrong ? "" : "Times and bytes are of one layer in a typical iteration, with 45.2 prompt tokens and 2,870 decodes.",
    palette: Object.entries(OPS).map(([name, [about]]) => ({ name, label: name, about, own: name === "gate_norm", placed: names.has(name) })),
    presets: Object.entries(PRESETS).map(([name, [label]]) => ({ name, label })),
    lacks: wrong ? [] : lacksOf(ranges),
    together: { attention: ["prefill_attention", "decode_attention"], moe: ["route", "experts", "combine"] },
  };
}

const spelled = (chain) =>
  chain.map((each) => {
    if (each.kind === "move") return each.target === "cpu" ? "offload" : "load";
    return each.kind === "card" ? `${each.device}(${each.name})` : `(${each.arms.map(spelled).join(" | ")})`;
  }).join(" >> ");

function codeOf(ranges) {
  const head = "import workbench as wb\nfrom workbench.pipeline import (\n    cpu, fetch, gpu, load, offload,\n)\nfrom workbench.stages import *  # every operation\n\n";
  const broken = (chain) => spelled(chain).replaceAll(" >> ", "\n    >> ").replaceAll(")\n    >> gpu(", ", ").replaceAll(")\n    >> cpu(", ", ");
  if (ranges.length === 1) return `${head}layer = fetch(weights) | (\n    ${broken(ranges[0].chain)}\n)`;
  const names = ranges.map((_, index) => `part_${index}`);
  const bodies = ranges.map((each, index) => `${names[index]} = fetch(weights) | (\n    ${broken(each.chain)}\n)`);
  const stack = ranges.map((each, index) => `${names[index]}[${each.first || ""}:${each.stop === 32 ? "" : each.stop}]`).join(" + ");
  return `${head}${bodies.join("\n\n")}\n\nlayers = ${stack}`;
}

const SETTINGS = {
  memory: { gpu: "16 GB", cpu: "265 GB" },
  groups: [
    {
      title: "Model and machine",
      controls: [
        { name: "model", label: "Model", kind: "choice", value: "mixtral-8x7b", options: [["mixtral-8x7b", "Mixtral 8x7B"], ["qwen3-30b", "Qwen3 30B-A3B"], ["deepseek-v3", "DeepSeek-V3"]].map(([value, label]) => ({ value, label, why: "" })) },
        { name: "machine", label: "Machine", kind: "choice", value: "a40", options: [["a40", "A40, 16 GB of it, 2x Xeon 6430"], ["t4", "T4 with 24 cores"], ["here", "this computer"]].map(([value, label]) => ({ value, label, why: "" })) },
        { name: "link", label: "Link", kind: "slider", at: 6, steps: ["2 GB/s", "4 GB/s", "6 GB/s", "8 GB/s", "12 GB/s", "16 GB/s", "17 GB/s", "25 GB/s", "50 GB/s"], note: "" },
        { name: "gpu_memory", label: "GPU memory", kind: "slider", at: 2, steps: ["8 GB", "12 GB", "16 GB", "24 GB", "48 GB"], note: "" },
      ],
    },
    {
      title: "Requests",
      controls: [
        { name: "workload", label: "Workload", kind: "choice", value: "mtbench", options: [["mtbench", "MTBench"], ["rag", "RAG prompts"]].map(([value, label]) => ({ value, label, why: "" })) },
        { name: "requests", label: "Requests", kind: "slider", at: 4, steps: ["10", "100", "1,000", "5,000", "20,000"], note: "" },
        { name: "prompt", label: "Prompt length", kind: "slider", at: 3, steps: ["32", "64", "128", "as recorded", "512", "1,024"], note: "tokens" },
        { name: "output", label: "Output length", kind: "slider", at: 2, steps: ["32", "64", "128", "256"], note: "tokens" },
      ],
    },
    {
      title: "Memory and schedule",
      controls: [
        { name: "kv_capacity", label: "KV capacity", kind: "slider", at: 7, steps: ["4 GB", "8 GB", "16 GB", "24 GB", "32 GB", "48 GB", "60 GB", "70 GB", "96 GB", "128 GB"], note: "" },
        { name: "scheduler", label: "Scheduler", kind: "choice", value: "aware", options: [["aware", "ResourceAware"], ["fcfs", "First come, first served"]].map(([value, label]) => ({ value, label, why: "" })) },
        { name: "schedule", label: "Schedule", kind: "choice", value: "vslpipe", options: [["vslpipe", "VSLPipe", ""], ["sequential", "Sequential, prefetch", ""], ["cgopipe", "CGOPipe", "it takes attention on the CPU for every row; prefill_attention is on the GPU"], ["ktransformers", "KTransformers", "it takes experts on the CPU; experts is on the GPU"]].map(([value, label, why]) => ({ value, label, why })) },
        { name: "max_running", label: "Running sequences, at most", kind: "slider", at: 5, steps: ["16", "64", "256", "1,024", "4,096", "no limit"], note: "" },
        { name: "live", label: "Draw lanes of this computer", kind: "flag", value: true },
      ],
    },
  ],
};
const FIGURES = {
  problem: "", mends: [], sample: "",
  rows: [
    { name: "VSLPipe", source: "bound", chosen: true, gen_tok_s: "679", of_bound: 1, ttft: "", tbt: "", seconds: "63 min", energy: "", limited: "the KV capacity", why: "" },
    { name: "VSLPipe", source: "simulated", chosen: true, gen_tok_s: "631", of_bound: 0.93, ttft: "2.1 s", tbt: "140 ms", seconds: "68 min", energy: "0.41 J/token", limited: "the link to the GPU (98 % busy)", why: "" },
    { name: "Sequential, prefetch", source: "simulated", chosen: false, gen_tok_s: "402", of_bound: 0.59, ttft: "3.4 s", tbt: "212 ms", seconds: "106 min", energy: "0.58 J/token", limited: "waiting between lanes", why: "" },
    { name: "VSLPipe", source: "measured", chosen: false, gen_tok_s: "203", of_bound: 0.3, ttft: "6.0 s", tbt: "430 ms", seconds: "210 min", energy: "", limited: "the link, which gives 5.4 of the assumed 17 GB/s", why: "" },
    { name: "CGOPipe", source: "simulated", chosen: false, gen_tok_s: "", of_bound: null, ttft: "", tbt: "", seconds: "", energy: "", limited: "", why: "takes attention on the CPU for every row; prefill_attention is on the GPU" },
  ],
  ledger: [
    { name: "GPU memory", capacity: "16 GB", over: false, left: "1.1 GB free", parts: [{ name: "weight slots", size: "5.9 GB", share: 0.37 }, { name: "resident weights", size: "3.2 GB", share: 0.2 }, { name: "activations", size: "5.8 GB", share: 0.36 }] },
    { name: "Host memory", capacity: "265 GB", over: false, left: "101 GB free", parts: [{ name: "weights", size: "93.4 GB", share: 0.352 }, { name: "KV cache", size: "70 GB", share: 0.264 }, { name: "buffers", size: "0.6 GB", share: 0.002 }] },
  ],
  explain: [
    "The link to the GPU limits it: it is busy for 98 % of the time, and each layer streams 2.98 GB of weights.",
    "The GPU computes for 61 % of the time and waits for weights for the rest.",
    "70 GB of KV cache hold 2,870 sequences at once; twice as much would give 1.07 times the throughput.",
  ],
  prices: [{ what: "2x the link", gain: "1.42x", then: "then the GPU limits it" }, { what: "2x the KV capacity", gain: "1.07x", then: "then the link still limits it" }, { what: "2x the CPU", gain: "1.00x", then: "nothing waits for it" }],
};
const kv = [4e9, 8e9, 16e9, 24e9, 32e9, 48e9, 60e9, 70e9, 96e9, 128e9];
const CURVES = {
  x: { label: "KV capacity", unit: "B", log: true }, y: { label: "output tokens/s" }, at: 70e9, busy: false,
  lines: [
    { name: "bound", kind: "bound", points: kv.map((x) => [x, Math.min(720, 18 * (x / 1e9) ** 0.88)]) },
    { name: "VSLPipe", kind: "simulated", points: kv.map((x) => [x, Math.min(655, 16 * (x / 1e9) ** 0.86)]) },
    { name: "Sequential, prefetch", kind: "sample", points: kv.map((x) => [x, Math.min(430, 12 * (x / 1e9) ** 0.82)]) },
    { name: "measured", kind: "measured", points: [[8e9, 70], [24e9, 170], [48e9, 290], [70e9, 330]] },
  ],
  takes: { vslpipe: 4, sequential: 6 }, paced: "as simulated", chosen: "VSLPipe", axis: "kv_capacity", axes: [{ value: "kv_capacity", label: "KV capacity" }, { value: "max_running", label: "Running sequences" }],
};

function lanesOf() {
  const spans = [];
  const idle = [];
  for (let layer = 0; layer < 8; layer += 1) {
    const at = layer * 0.18;
    spans.push([2, at, at + 0.172, `W${layer}`, 41], [0, at + 0.02, at + 0.12, `A${layer}a`, 41], [1, at + 0.03, at + 0.075, `D${layer}a`, 41], [3, at + 0.022, at + 0.03, `o${layer}a`, 41], [2, at + 0.172, at + 0.176, `l${layer}a`, 41]);
    idle.push([0, at + 0.12, at + 0.2, `h2d W${layer + 1}`], [1, at + 0.075, at + 0.21, `gpu A${layer}a`]);
  }
  const labels = { A: "qkv, attention, experts", D: "decode_attention", W: "weights", o: "offload q k v", l: "load attn" };
  return { tracks: [{ title: "VSLPipe, simulated, iteration 41", lanes: ["gpu", "cpu", "h2d", "d2h"], labels, spans, idle }], labels, colours: { A: "#3b82f6", D: "#059669", W: "#d97706", o: "#a855f7", l: "#a855f7" }, naming: "A0a is task A in layer 0, for part a of the batch" };
}

const CHANNELS = [["output tokens", null], ["KV cache", 1], ["running", null], ["TBT p95", null], ["gpu", 1], ["cpu", 1], ["h2d", 1], ["d2h", 1]].map(([label, top]) => ({ label, top }));
const HELD = "Settings and wiring stay as they are; press Stop first.";
const NONE = { state: "none", can: true, why: "", text: "", share: 0, ended: null, stale: "", again: false, channels: CHANNELS };
const VARIANTS = [
  { id: 0, name: "A", about: "VSLPipe, 70 GB KV", code: "", notes: { "output tokens/s, measured": "measured while other programs took 12 % of the cores", "GPU memory": "weight slots 8.4 GB, activations 6.1 GB" }, rows: { "output tokens/s": "631", "output tokens/s, measured": "203", TTFT: "2.1 s", TBT: "140 ms", "GPU memory": "14.9 GB", energy: "0.41 J/token" }, best: ["output tokens/s", "energy", "TTFT", "TBT"] },
  { id: 1, name: "B", about: "Sequential, 70 GB KV", code: "", rows: { "output tokens/s": "402", TTFT: "3.4 s", TBT: "212 ms", "GPU memory": "9.0 GB", energy: "0.58 J/token" }, best: ["GPU memory"] },
];

const SCENES = {
  vslpipe: () => [range(0, 32, PRESETS.vslpipe[1])],
  empty: () => [range(0, 32, [])],
  fork: () => [range(0, 32, PRESETS.ktransformers[1])],
  shared: () => [{ ...range(0, 32, PRESETS.flexgen[1]), shared: true }],
  same: () => [range(0, 32, [["qkv", "gpu"], [[["prefill_attention", "gpu"], ["out_proj", "gpu"]], [["decode_attention", "gpu"]]], ["route", "gpu"], [[["shared_experts", "cpu"]], [["experts", "cpu"]]], ["combine", "gpu"]])],
  ranges: () => [range(0, 3, PRESETS.flexgen[1]), range(3, 26, PRESETS.ktransformers[1]), range(26, 32, PRESETS.vslpipe[1])],
  long: () => [range(0, 32, [["qkv", "gpu"], ["gate_norm", "gpu"], ["prefill_attention", "gpu"], ["decode_attention", "cpu"], ["out_proj", "gpu"], ["route", "gpu"], ["shared_experts", "gpu"], ["experts", "cpu"], ["combine", "gpu"]])],
  fault: () => [range(0, 32, [["decode_attention", "cpu"], ["out_proj", "gpu"], ["route", "gpu"], ["experts", "gpu"], ["combine", "gpu"]])],
};

export class FakeModel {
  constructor(scene, delay = 60) {
    this.delay = delay;
    this.sent = [];
    this.listeners = new Map();
    this.past = [];
    this.future = [];
    this.ranges = (SCENES[scene] ?? SCENES.vslpipe)();
    const parts = ["wiring", "live", "code", "settings", "figures", "curves", "explain", "lanes", "variants"];
    this.state = { parts, settings: clone(SETTINGS), figures: clone(FIGURES), curves: clone(CURVES), lanes: lanesOf(), variants: clone(VARIANTS), live: clone(NONE), answered: 0 };
    if (scene === "empty") Object.assign(this.state, { figures: { ...clone(FIGURES), rows: [], explain: [], prices: [], ledger: [] }, variants: [], lanes: { tracks: [], labels: {}, colours: {}, naming: "" }, curves: { ...clone(CURVES), lines: [], at: null } });
    if (scene === "over") this.state.figures.problem = "The KV cache of 70 GB and the weights need 281 GB of CPU memory; the machine has 265 GB.";
    if (scene === "over") Object.assign(this.state.figures, { mends: [{ id: 0, label: "Use 54 GB of KV cache" }] });
    if (scene === "over") Object.assign(this.state.figures.ledger[1], { over: true, left: "16 GB too much", parts: [{ name: "weights", size: "187 GB", share: 0.7 }, { name: "KV cache", size: "94 GB", share: 0.36 }] });
    this.draw();
  }

  get(name) {
    return this.state[name];
  }

  on(event, listener) {
    if (!this.listeners.has(event)) this.listeners.set(event, new Set());
    this.listeners.get(event).add(listener);
  }

  off(event, listener) {
    this.listeners.get(event)?.delete(listener);
  }

  fire(event, ...given) {
    this.listeners.get(event)?.forEach((listener) => listener(...given));
  }

  put(values) {
    Object.assign(this.state, values);
    Object.keys(values).forEach((name) => this.fire(`change:${name}`));
  }

  draw() {
    this.ranges.forEach(settled);
    this.put({ wiring: wiringOf(this.ranges, this.past.length, this.future.length), code: { text: codeOf(this.ranges), error: "", line: 0 } });
  }

  send(message) {
    if (this.dead) throw new Error("comm is closed");
    this.sent.push(message);
    setTimeout(() => this.answer(message), this.delay);
  }

  answer(message) {
    const act = this[`do_${message.do}`];
    if (["place", "shift", "add", "remove", "split", "option", "fetch", "fork", "join", "cut", "merge", "open", "clear", "mend"].includes(message.do)) {
      this.past.push(clone(this.ranges));
      this.future = [];
    }
    act?.call(this, message);
    this.put({ answered: message.n });
  }

  edit(message, change) {
    change(this.ranges[message.range].chain, this.ranges[message.range]);
    this.draw();
  }

  do_place(m) {
    this.edit(m, (chain) => {
      siblings(chain, m.path)[last(m.path)].device = m.device;
      if (m.to) shifted(chain, m);
    });
  }
  do_option(m) {
    if (m.name === "experts" && !/^(all|~?-?\d*:-?\d*)$/.test(m.value)) {
      const refused = `'${m.value}' names no experts; write a range such as :4, ~:4 for all others, the name of an ExpertSet, or all.`;
      this.put({ wiring: { ...this.state.wiring, refused } });
      return;
    }
    this.edit(m, (chain) => {
      const here = siblings(chain, m.path)[last(m.path)];
      if (m.name === "experts") here.name = m.value === "all" ? "experts" : `experts[${m.value}]`;
      here.options.find((each) => each.name === m.name).value = m.value;
    });
  }
  do_split(m) {
    const arms = [card(["experts[:4]", "gpu"]), card(["experts[~:4]", "cpu"])].map((each) => [each]);
    this.edit(m, (chain) => siblings(chain, m.path).splice(last(m.path), 1, { kind: "fork", path: [], arms }));
  }
  do_remove(m) { this.edit(m, (chain) => siblings(chain, m.path).splice(last(m.path), 1)); }
  do_add(m) { this.edit(m, (chain) => siblings(chain, m.to).splice(last(m.to), 0, card([m.op, m.device]))); }
  do_fetch(m) { this.edit(m, (_, here) => (here.fetches.find((each) => each.name === m.name).on = m.on)); }
  do_join(m) { this.edit(m, (chain) => siblings(chain, m.path).splice(last(m.path), 1, ...siblings(chain, m.path)[last(m.path)].arms.flat())); }
  do_fork(m) {
    this.edit(m, (chain) => {
      const all = siblings(chain, m.path);
      const [a, b] = [Math.min(last(m.path), last(m.with)), Math.max(last(m.path), last(m.with))];
      const arms = (each) => (each.kind === "fork" ? each.arms : [[each]]);
      all.splice(a, b - a + 1, { kind: "fork", path: [], arms: [...arms(all[a]), ...arms(all[b])] });
    });
  }
  do_shift(m) { this.edit(m, (chain) => shifted(chain, m)); }
  do_cut(m) {
    const old = this.ranges[m.range];
    const second = { ...clone(old), first: m.layer, title: `layers ${m.layer} to ${old.stop - 1}` };
    Object.assign(old, { stop: m.layer, title: `layers ${old.first} to ${m.layer - 1}` });
    this.ranges.splice(m.range + 1, 0, second);
    this.draw();
  }
  do_merge(m) {
    const [one, two] = this.ranges.slice(m.range, m.range + 2);
    Object.assign(one, { stop: two.stop, title: `layers ${one.first} to ${two.stop - 1}` });
    this.ranges.splice(m.range + 1, 1);
    this.draw();
  }
  do_open(m) { this.ranges = [range(0, 32, PRESETS[m.name][1])]; this.draw(); }
  do_clear() { this.ranges = [range(0, 32, [])]; this.draw(); }
  do_mend(m) {
    if (m.id >= 100) return this.complete(Math.floor(m.id / 100) - 1, Math.floor((m.id % 100) / 2), m.id % 2 ? "cpu" : "gpu");
    const { path, range: at } = this.state.wiring.fault;
    const all = this.ranges[at].chain;
    if (m.id) all.splice(path[0], 1);
    else all.splice(path[0], 0, card(["qkv", "gpu"]));
    this.draw();
  }
  complete(range, op, device) {
    const behind = (each) => each.kind === "card" && BUILT_IN.indexOf(each.name) > op;
    this.edit({ range }, (chain) => chain.splice(chain.findIndex(behind), 0, card([BUILT_IN[op], device])));
  }
  do_undo() { if (this.past.length) { this.future.push(clone(this.ranges)); this.ranges = this.past.pop(); this.draw(); } }
  do_redo() { if (this.future.length) { this.past.push(clone(this.ranges)); this.ranges = this.future.pop(); this.draw(); } }
  do_code(m) {
    const wrong = m.text.split("\n").findIndex((line) => line.includes("import os"));
    const error = wrong < 0 ? "" : "only workbench's own words can be imported here, and os is none of them";
    this.put({ code: { text: m.text, error, line: wrong + 1 } });
  }
  do_set(m) {
    const settings = clone(this.state.settings);
    const control = settings.groups.flatMap((group) => group.controls).find((each) => each.name === m.name);
    control[control.kind === "slider" ? "at" : "value"] = m.value;
    const figures = { ...this.state.figures, sample: m.rest ? "" : "first 2,000 of 20,000 requests" };
    const curves = m.name === "kv_capacity" ? { ...this.state.curves, at: kv[m.value] } : this.state.curves;
    const live = { ...this.state.live, stale: this.state.live.ended === null ? "" : "at other settings" };
    this.put({ settings, figures, curves, live });
  }
  do_fix() { this.put({ figures: clone(FIGURES) }); }
  do_pin() {
    const id = Math.max(-1, ...this.state.variants.map((each) => each.id)) + 1;
    this.put({ variants: [...this.state.variants, { ...clone(VARIANTS[0]), id, name: "ABCDEFGH"[id], best: [] }] });
  }
  do_unpin(m) { this.put({ variants: this.state.variants.filter((each) => each.id !== m.id) }); }
  do_axis(m) { this.put({ curves: { ...this.state.curves, axis: m.name, x: { ...this.state.curves.x, label: this.state.curves.axes.find((each) => each.value === m.name).label } } }); }
  do_keep() { this.fire("msg:custom", { kept: this.kept ?? "" }); }
  do_sweep() { this.do_start(); this.put({ live: { ...this.state.live, sweeping: true } }); }
  do_start() {
    this.fire("msg:custom", { fresh: true, samples: [] });
    let step = 0;
    this.put({ live: { ...NONE, state: "running", held: HELD, text: "0 of 1,024 output tokens", share: 0 } });
    this.clock = setInterval(() => {
      if (this.state.live.state !== "running") return;
      step += 1;
      const values = CHANNELS.map((channel, index) => (channel.top ? 0.5 + 0.4 * Math.sin(step / 9 + index) : 200 + 40 * Math.sin(step / 7 + index)));
      this.fire("msg:custom", { samples: [[step / 8, values, values.map((value, index) => (CHANNELS[index].top ? `${Math.round(100 * value)} %` : `${Math.round(value)}${index ? "" : " tok/s"}`)), values.map(() => "last 3 s; whole run 203 tok/s")]] });
      const done = Math.min(1024, step * 8);
      this.put({ live: { ...this.state.live, state: done < 1024 ? "running" : "finished", text: `${done.toLocaleString("en-US")} of 1,024 output tokens in ${(step / 8).toFixed(1)} s`, share: done / 1024, ended: done < 1024 ? null : Date.now() / 1000, again: done >= 1024 } });
    }, 125);
  }
  do_calibrate() { this.put({ live: { ...this.state.live, state: "loading", calibrating: true, can: false, calibrate: "", text: "timing operations of mixtral-8x7b, about 40 s left", share: 0.25, held: HELD } }); }
  do_pause() { this.put({ live: { ...this.state.live, state: "paused" } }); }
  do_resume() { this.put({ live: { ...this.state.live, state: "running" } }); }
  do_stop() {
    clearInterval(this.clock);
    this.put({ live: { ...this.state.live, state: "stopping" } });
    const swept = this.state.live.sweeping ? "stopped in run 1 of 10; 0 points kept" : "";
    const { calibrating } = this.state.live;
    const none = { ...NONE, calibrate: "Calibrate (1 to 2 min)", noted: "The calibration was stopped." };
    const over = calibrating ? { ...none, calibrating: false, held: "" } : { state: "stopped", held: "", ended: Date.now() / 1000, again: true, sweeping: false, swept };
    setTimeout(() => this.put({ live: { ...this.state.live, ...over } }), this.delay);
  }
}
