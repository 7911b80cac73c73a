// One small chart per channel. A sample is [seconds, values, texts, notes]; the newest stand at the right.
const SECONDS = 60;
const GUTTER = 38; // room for the number at the top of a scale that grows with its samples
const COLOURS = ["#059669", "#3b82f6", "#a855f7", "#dc2626", "#d97706", "#d97706", "#d97706", "#d97706"];

function element(tag, name, parent) {
  const made = document.createElement(tag);
  made.className = name;
  parent.append(made);
  return made;
}

function gauge(channel, parent) {
  const box = element("div", "wb-gauge", parent);
  const head = element("div", "wb-gauge-head", box);
  element("span", "wb-gauge-label", head).textContent = channel.label;
  const text = element("span", "wb-gauge-value", head);
  const note = element("div", "wb-gauge-note", box);
  const canvas = element("canvas", "wb-gauge-chart", box);
  canvas.setAttribute("role", "img");
  return { channel, box, note, text, canvas };
}

function highest(channel, samples, index) {
  return channel.top ?? Math.max(0, ...samples.map((sample) => sample[1][index]));
}

// The top of a scale in two digits; times have their unit.
function amount(value, unit) {
  const short = (each) => Number(each.toPrecision(2));
  if (unit !== "s") return short(value);
  return value < 1 ? `${short(1000 * value)}\u202fms` : `${short(value)}\u202fs`;
}

// Sizes and styles are read here and not while drawing, which would make the browser lay out the page every time.
function measure(part) {
  const { canvas } = part;
  const style = getComputedStyle(canvas);
  part.ratio = window.devicePixelRatio || 1;
  [part.width, part.height] = [canvas.clientWidth, canvas.clientHeight];
  [part.ink, part.font] = [style.color, `10px ${style.fontFamily}`];
  canvas.width = Math.round(part.width * part.ratio);
  canvas.height = Math.round(part.height * part.ratio);
}

function draw(part, index, samples) {
  const { canvas, channel, ratio, width, height } = part;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  if (!samples.length) return;
  const grows = channel.top === null;
  const most = highest(channel, samples, index);
  const top = (grows ? 1.1 * most : most) || 1;
  const left = grows ? GUTTER : 0;
  const last = samples[samples.length - 1][0];
  const begin = Math.max(0, last - SECONDS);
  const span = Math.max(last - begin, 4);
  const x = (sample) => left + ((sample[0] - begin) / span) * (width - left);
  const y = (sample) => height - 1 - (sample[1][index] / top) * (height - 3);
  pen.beginPath();
  samples.forEach((sample, i) => (i ? pen.lineTo(x(sample), y(sample)) : pen.moveTo(x(sample), y(sample))));
  pen.strokeStyle = pen.fillStyle = COLOURS[index % COLOURS.length];
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.lineTo(x(samples[samples.length - 1]), height);
  pen.lineTo(x(samples[0]), height);
  pen.globalAlpha = 0.15;
  pen.fill();
  pen.globalAlpha = 1;
  if (!grows || !most) return;
  [pen.fillStyle, pen.font] = [part.ink, part.font];
  pen.fillText(amount(most, channel.unit), 0, 9);
}

// The times of the run that the charts go over.
function over(samples) {
  if (!samples.length) return "";
  const last = samples[samples.length - 1][0];
  const begin = Math.max(0, last - SECONDS);
  return `Charts: second ${Math.floor(begin)} to ${Math.ceil(last)} of the run`;
}

export default () => {
  let samples = [];
  const views = new Set();
  return {
    initialize({ model }) {
      model.on("msg:custom", (message) => {
        const kept = message.fresh ? [] : samples;
        const all = kept.concat(message.samples);
        const last = all.length ? all[all.length - 1][0] : 0;
        samples = all.filter((sample) => sample[0] >= last - SECONDS);
        views.forEach((show) => show());
      });
      model.send({ ask: "history" });
    },
    render({ model, el }) {
      el.classList.add("wb-strip");
      const grid = element("div", "wb-strip-grid", el);
      const parts = model.get("channels").map((channel) => gauge(channel, grid));
      const times = element("div", "wb-strip-times", el);
      let frames = 0;
      const show = () => {
        const last = samples[samples.length - 1];
        el.classList.toggle("wb-strip-empty", !last);
        times.textContent = over(samples);
        parts.forEach((part, index) => {
          part.text.textContent = last ? last[2][index] : "–";
          part.note.textContent = last ? last[3][index] : "";
          part.canvas.setAttribute("aria-label", [part.channel.label, part.text.textContent, part.note.textContent].join(" "));
          draw(part, index, samples);
        });
        el.dataset.frames = frames += 1;
      };
      const remeasure = () => {
        parts.forEach(measure);
        show();
      };
      const resized = new ResizeObserver(remeasure);
      resized.observe(grid);
      // A theme is loaded while the page is hidden: whoever observes anew is told the size once it is shown.
      const theme = new MutationObserver(() => {
        resized.disconnect();
        resized.observe(grid);
      });
      theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name"] });
      views.add(show);
      return () => {
        resized.disconnect();
        theme.disconnect();
        views.delete(show);
      };
    },
  };
};
