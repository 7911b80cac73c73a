// Lane charts on one time axis. A track is {title, lanes, labels, spans: [[lane, start, end, name, iteration], ...],
// idle: [[lane, start, end, after], ...]}. `after` is lane and name of the task that was waited for, or "iteration",
// or nothing. `labels` say what the codes of its tasks stand for.
const LEFT = 44;
const RIGHT = 24;
const ROW = 18;
const TITLE = 20;
const AXIS = 22;

// The code of a node that a task's name begins with: a letter, and subscripts behind it.
function codeOf(name) {
  return name.match(/^.[₀-₉]*/)[0];
}

function element(tag, name, parent) {
  const made = document.createElement(tag);
  made.className = name;
  parent.append(made);
  return made;
}

// Black or white, whichever reads better on a colour: they do equally at a relative luminance of 0.18.
function inkOn(colour) {
  const linear = [1, 3, 5].map((at) => {
    const share = Number.parseInt(colour.slice(at, at + 2), 16) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.18 ? "#000" : "#fff";
}

function duration(seconds) {
  const [unit, scale] = seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${Number((seconds * scale).toPrecision(3))} ${unit}`;
}

function tickStep(span, most) {
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function parted(after) {
  const at = after.indexOf(" ");
  return at < 0 ? [after, ""] : [after.slice(0, at), after.slice(at + 1)];
}

// A text that is no wider than the room for it.
function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let kept = text.length;
  while (kept > 0 && pen.measureText(`${text.slice(0, kept)}…`).width > width) kept -= 1;
  return `${text.slice(0, kept)}…`;
}

class Chart {
  constructor(model, el) {
    this.model = model;
    el.classList.add("wb-gantt");
    this.legend = element("div", "wb-gantt-legend", el);
    this.canvas = element("canvas", "wb-gantt-chart", el);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.tip = element("div", "wb-gantt-tip", el);
    this.hint = element("div", "wb-gantt-hint", el);
    this.wide = 0; // pixels, once they are told
    this.hint.textContent = "Ctrl + wheel, + and −: zoom · drag, arrow keys: pan · double click, 0: everything";
    this.load();
  }

  load() {
    this.tracks = this.model.get("tracks");
    this.rows = this.tracks.flatMap((track) => track.spans);
    this.end = Math.max(1e-9, ...this.rows.map((span) => span[2]));
    [this.from, this.to] = [0, this.end];
    const lanes = this.tracks.reduce((sum, track) => sum + track.lanes.length, 0);
    this.tall = this.tracks.length * TITLE + lanes * ROW + AXIS;
    this.canvas.style.height = `${this.tall}px`;
    const about = this.tracks.map((track) => `${track.title}, ${track.spans.length} tasks`).join("; ");
    this.canvas.setAttribute("aria-label", `Lane charts: ${about}`);
    this.drawLegend();
    this.canvas.parentElement.classList.toggle("wb-gantt-empty", !this.tracks.length);
    this.draw();
  }

  drawLegend() {
    const codes = [...new Set(this.rows.map((span) => codeOf(span[3])))].sort();
    const labels = this.model.get("labels");
    this.legend.replaceChildren();
    for (const code of codes) {
      const item = element("span", "wb-gantt-key", this.legend);
      element("i", "", item).style.background = this.colour(code);
      item.append(`${code}  ${labels[code] ?? ""}`);
    }
    element("span", "wb-gantt-naming", this.legend).textContent = this.model.get("naming");
  }

  colour(code) {
    return this.model.get("colours")[code] ?? "#6b7280";
  }

  get width() {
    return Math.max(1, this.wide - LEFT - RIGHT);
  }

  x(seconds) {
    return LEFT + ((seconds - this.from) / (this.to - this.from)) * this.width;
  }

  seconds(x) {
    return this.from + ((x - LEFT) / this.width) * (this.to - this.from);
  }

  // Width and style are read once the page is laid out, and kept: to ask for them while it changes lays it out once more.
  measure() {
    const { canvas } = this;
    if (canvas.clientWidth === this.wide) return;
    const style = getComputedStyle(canvas);
    this.wide = canvas.clientWidth;
    this.ink = style.color;
    this.font = `12px ${style.fontFamily}`;
    this.draw();
  }

  draw() {
    const { canvas, wide: width } = this;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    const [across, down] = [Math.round(width * ratio), Math.round(this.tall * ratio)];
    const pen = canvas.getContext("2d");
    if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down]; // and empty
    else pen.clearRect(0, 0, width, this.tall);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = this.font;
    pen.textBaseline = "middle";
    this.cut = new Set(); // tracks whose title has no room
    let top = 0;
    this.tracks.forEach((track) => {
      this.drawTrack(pen, track, top, width, this.ink);
      top += TITLE + track.lanes.length * ROW;
    });
    if (this.tracks.length) this.drawAxis(pen, top, this.ink);
  }

  drawTrack(pen, track, top, width, ink) {
    pen.fillStyle = ink;
    pen.textAlign = "left";
    const title = cut(pen, track.title, width - LEFT - RIGHT);
    if (title !== track.title) this.cut.add(track);
    pen.fillText(title, LEFT, top + TITLE / 2);
    track.lanes.forEach((lane, row) => {
      const y = top + TITLE + row * ROW;
      pen.fillStyle = ink;
      pen.fillText(lane, 8, y + ROW / 2);
      pen.globalAlpha = 0.06;
      pen.fillRect(LEFT, y + 1, width - LEFT - RIGHT, ROW - 2);
      pen.globalAlpha = 1;
    });
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, top, width - LEFT - RIGHT, TITLE + track.lanes.length * ROW);
    pen.clip();
    this.drawSpans(pen, track, top + TITLE);
    this.drawIdle(pen, track, top + TITLE, ink);
    pen.restore();
  }

  drawSpans(pen, track, top) {
    const filled = track.lanes.map(() => new Map()); // by pixel: share that short tasks kept the lane busy
    const column = (lane, x, share, colour) => {
      const below = filled[lane].get(x) ?? 0;
      const height = Math.min(share, 1 - below) * (ROW - 4);
      pen.fillStyle = colour;
      pen.fillRect(x, top + lane * ROW + 2 + (1 - below) * (ROW - 4) - height, 1, height);
      filled[lane].set(x, below + share);
    };
    const wide = [];
    for (const [lane, start, end, name] of track.spans) {
      if (end < this.from || start > this.to) continue;
      const [left, right] = [this.x(start), this.x(end)];
      const [pixel, colour] = [Math.floor(left), this.colour(codeOf(name))];
      if (right - left >= 1) {
        wide.push([left, top + lane * ROW + 2, right - left - 0.5, colour, name]);
      } else if (right > left) {
        const edge = Math.min(pixel + 1, right);
        column(lane, pixel, edge - left, colour);
        if (right > edge) column(lane, pixel + 1, right - edge, colour);
      }
    }
    pen.textAlign = "center";
    for (const [x, y, length, colour, name] of wide.sort((a, b) => b[2] - a[2])) {
      pen.fillStyle = colour; // long ones first: short transfers pass within long ones
      pen.fillRect(x, y, length, ROW - 4);
      this.drawName(pen, name, Math.max(LEFT, x), Math.min(this.x(this.to), x + length), y, colour);
    }
  }

  // The name of a task in its bar, or its letter, where there is room.
  drawName(pen, name, left, right, y, colour) {
    const fits = (words) => pen.measureText(words).width + 6 < right - left;
    const words = right - left < 12 ? "" : [name, codeOf(name)].find(fits);
    if (!words) return;
    pen.fillStyle = inkOn(colour);
    pen.fillText(words, (left + right) / 2, y + (ROW - 4) / 2);
  }

  drawIdle(pen, track, top, ink) {
    pen.fillStyle = ink;
    pen.textAlign = "center";
    for (const [lane, start, end, after] of track.idle) {
      const [left, right] = [Math.max(LEFT, this.x(start)), Math.min(this.x(this.to), this.x(end))];
      const words = right - left < 30 ? "" : this.waited(track, lane, after);
      if (words && pen.measureText(words).width + 12 < right - left) {
        pen.fillText(words, (left + right) / 2, top + (lane + 0.5) * ROW);
      }
    }
  }

  waited(track, lane, after) {
    const [other, name] = parted(after);
    if (!name) return after && "next iteration";
    return other === track.lanes[lane] ? "" : `waits for ${name}`;
  }

  drawAxis(pen, top, ink) {
    const step = tickStep(this.to - this.from, this.width / 90);
    pen.fillStyle = pen.strokeStyle = ink;
    pen.textAlign = "center";
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      pen.globalAlpha = 0.35;
      pen.fillRect(this.x(tick), top, 1, 4);
      pen.globalAlpha = 1;
      pen.fillText(tick ? duration(tick) : "0", this.x(tick), top + 13);
    }
  }

  under(x, y) {
    let top = 0;
    for (const track of this.tracks) {
      const lane = Math.floor((y - top - TITLE) / ROW);
      if (y >= top && y < top + TITLE) return this.cut.has(track) ? track.title : undefined;
      if (lane >= 0 && lane < track.lanes.length) {
        const time = this.seconds(x);
        const near = ((this.to - this.from) / this.width) * 1.5;
        const span = track.spans.find((s) => s[0] === lane && s[1] - near <= time && time <= s[2] + near);
        const idle = track.idle.find((i) => i[0] === lane && i[1] <= time && time <= i[2]);
        return span ? this.aboutSpan(span, track) : idle && this.aboutIdle(idle, track);
      }
      top += TITLE + track.lanes.length * ROW;
    }
    return undefined;
  }

  // A code may stand for other operations in another track.
  label(name, track) {
    return track.labels[codeOf(name)] ?? "";
  }

  aboutSpan([, start, end, name, iteration], track) {
    return `${name}  ${this.label(name, track)}: ${duration(end - start)} from ${duration(start)}, iteration ${iteration}`;
  }

  aboutIdle([, start, end, after], track) {
    const [lane, name] = parted(after);
    const until = name ? `, until ${name} on ${lane}  ${this.label(name, track)}` : after && ", until the next iteration";
    return `idle for ${duration(end - start)} from ${duration(start)}${until}`;
  }

  hover(event) {
    const words = this.under(event.offsetX, event.offsetY);
    this.tip.hidden = !words;
    if (!words) return;
    this.tip.textContent = words;
    const room = this.wide - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, room))}px`;
    this.tip.style.top = `${this.canvas.offsetTop + event.offsetY + 16}px`;
  }

  zoom(factor, at) {
    const span = Math.min(this.end, Math.max((this.to - this.from) * factor, this.end * 1e-5));
    const share = (at - this.from) / (this.to - this.from);
    this.place(at - share * span, span);
  }

  pan(seconds) {
    this.place(this.from + seconds, this.to - this.from);
  }

  place(from, span) {
    this.from = Math.min(Math.max(0, from), this.end - span);
    this.to = this.from + span;
    this.draw();
  }

  everything() {
    this.place(0, this.end);
  }

  key(event) {
    const middle = (this.from + this.to) / 2;
    const step = (this.to - this.from) / 5;
    const act = {
      "+": () => this.zoom(0.7, middle),
      "-": () => this.zoom(1 / 0.7, middle),
      ArrowLeft: () => this.pan(-step),
      ArrowRight: () => this.pan(step),
      0: () => this.everything(),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    event.stopPropagation();
  }
}

function listen(chart) {
  const { canvas } = chart;
  let held = null;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    chart.zoom(event.deltaY > 0 ? 1.25 : 0.8, chart.seconds(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (held = null));
  canvas.addEventListener("pointerleave", () => (chart.tip.hidden = true));
  canvas.addEventListener("pointermove", (event) => {
    if (held === null) return chart.hover(event);
    chart.pan(chart.seconds(held) - chart.seconds(event.offsetX));
    held = event.offsetX;
  });
  canvas.addEventListener("dblclick", () => chart.everything());
  canvas.addEventListener("keydown", (event) => chart.key(event));
}

function render({ model, el }) {
  const chart = new Chart(model, el);
  listen(chart);
  const load = () => chart.load();
  model.on("change:tracks", load);
  const resized = new ResizeObserver(() => chart.measure());
  resized.observe(chart.canvas);
  // A theme is loaded while the page is hidden: whoever observes anew is told the size once it is shown.
  const again = () => {
    chart.wide = 0;
    resized.disconnect();
    resized.observe(chart.canvas);
  };
  const theme = new MutationObserver(again);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name"] });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", again);
  return () => {
    resized.disconnect();
    theme.disconnect();
    dark.removeEventListener("change", again);
    model.off("change:tracks", load);
  };
}

export default { render };
