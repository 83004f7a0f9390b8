"use strict";
// Where a run's time went, and how it was made.

const timing = {
  run: 0,
  view(app) {
    const holder = h("div");
    const { runs } = app.content;
    if (!runs[this.run]) this.run = 0;
    const draw = () => holder.replaceChildren(...[
      runs.length > 1 ? h("div", { class: "bar" }, choice("run", runs.map((run, i) => [String(i), run.label]), String(this.run), (value) => { this.run = Number(value); draw(); })) : null,
      stackOf(runs[this.run]), spansOf(runs[this.run])].flat().filter(Boolean));
    draw();
    return h("section", {}, holder);
  },
};

// A bar per step, of the parts of its time.
function stackOf(run) {
  const inner = new Set(["time/total", "time/sampling_time_max", "time/sampling_time_min", "time/sampling_time_mean"]);
  const keys = Object.keys(run.metrics).filter((key) => key.startsWith("time/") && !inner.has(key) && !key.includes(":") && run.metrics[key].some((value) => value > 0));
  const total = run.metrics["time/total"] || [];
  if (!total.length) return [h("p", { class: "none" }, "This run tells no times.")];
  const sums = keys.map((key) => [key, run.metrics[key].filter(isNumber).reduce((a, b) => a + b, 0)]).sort((a, b) => b[1] - a[1]);
  const shown = sums.slice(0, 7).map(([key]) => key);
  const most = Math.max(...total.filter(isNumber), 1e-9);
  const [height, bar] = [220, Math.max(2, Math.min(26, 900 / total.length))];
  const width = 60 + bar * total.length;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height + 30}`, style: `width:${Math.min(width, 1100)}px;max-width:100%`, role: "img", "aria-label": "seconds per step" });
  total.forEach((whole, i) => {
    let y = height;
    const part = (seconds, colour, name) => {
      if (!isNumber(seconds) || seconds <= 0) return;
      const size = (seconds / most) * (height - 10);
      y -= size;
      drawing.append(svg("rect", { x: 50 + bar * i, y, width: Math.max(1, bar - 1), height: Math.max(0.5, size), fill: colour,
        onmousemove: (event) => tip.show(`step ${run.metrics.step[i]}: ${name} ${show(seconds)} s of ${show(whole)}`, event), onmouseleave: () => tip.hide() }));
    };
    let told = 0;
    shown.forEach((key, k) => { const seconds = run.metrics[key][i]; part(seconds, colourOf(k), key); told += isNumber(seconds) ? seconds : 0; });
    part((whole || 0) - told, "#9a9a9a", "the rest");
  });
  drawing.append(svg("text", { x: 44, y: 14, "text-anchor": "end" }, show(most) + " s"), svg("text", { x: 44, y: height, "text-anchor": "end" }, "0"),
    svg("text", { x: 50, y: height + 18 }, `step ${run.metrics.step[0]}`), svg("text", { x: width, y: height + 18, "text-anchor": "end" }, `${run.metrics.step[run.metrics.step.length - 1]}`));
  const legend = h("p", { class: "bar" }, shown.map((key, k) => h("span", {}, h("span", { class: "swatch", style: `background:${colourOf(k)}` }), key.slice(5))), h("span", {}, h("span", { class: "swatch", style: "background:#9a9a9a" }), "the rest"));
  return [h("h2", {}, "Seconds per step"), drawing, legend];
}

// The spans of a trace over one step at a time: a row per name.
function spansOf(run) {
  if (!run.spans.length) return [h("p", { class: "dim" }, "enable_trace=true writes spans of client, scheduler, sampler and trainer, which are drawn here.")];
  const steps = run.spans.filter((span) => span.name === "iteration");
  const windows = steps.length ? steps : [{ start: run.spans[0].start, seconds: run.spans[run.spans.length - 1].start - run.spans[0].start + run.spans[run.spans.length - 1].seconds, args: {} }];
  const holder = h("div");
  const draw = (which) => {
    const at = windows[which];
    const spans = run.spans.filter((span) => span.start >= at.start && span.start + span.seconds <= at.start + at.seconds + 1e-9 && span !== at);
    const rows = [...new Set(spans.map((span) => span.name))];
    const [width, left] = [1000, 220];
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${rows.length * 18 + 20}`, style: "width:100%;max-width:1200px", role: "img", "aria-label": "spans of a step" });
    rows.forEach((name, i) => drawing.append(svg("text", { x: left - 8, y: 18 * i + 13, "text-anchor": "end" }, name)));
    for (const span of spans.slice(0, 4000)) {
      const said = `${span.name} (${span.row}): ${show(span.seconds)} s, from ${show(span.start - at.start)} s on`;
      drawing.append(svg("rect", { x: left + ((span.start - at.start) / at.seconds) * (width - left), y: 18 * rows.indexOf(span.name) + 2, width: Math.max(1, (span.seconds / at.seconds) * (width - left)), height: 14,
        fill: colourOf(rows.indexOf(span.name)), "fill-opacity": 0.65, onmousemove: (event) => tip.show(said, event), onmouseleave: () => tip.hide() }));
    }
    holder.replaceChildren(drawing);
  };
  draw(windows.length - 1);
  return [h("h2", {}, "Spans"), h("div", { class: "bar" }, choice("step", windows.map((at, i) => [String(i), at.args && at.args.step !== undefined ? String(at.args.step) : String(i)]), String(windows.length - 1), (value) => draw(Number(value)))), holder];
}

const config = {
  view(app) {
    return h("section", {}, [...app.chosen].map((i) => app.content.runs[i]).map((run) => {
      const rows = Object.entries(run.config).map(([key, value]) => ({ key, value: flat(value) }));
      const { args, resumed, ...facts } = run.metadata;
      const told = Object.entries(facts).map(([key, value]) => ({ key, value: flat(value) }));
      const columns = [{ key: "key", title: "key" }, { key: "value", title: "value" }];
      return h("article", {}, h("h2", {}, run.label), h("h2", {}, "Made by"), h("div", { class: "scroll" }, sortable(columns, told)), (resumed || []).length ? h("p", {}, `Resumed ${resumed.length} times: ` + resumed.map((entry) => entry.timestamp).join(", ")) : null,
        h("h2", {}, "Config"), h("div", { class: "scroll" }, sortable(columns, rows)));
    }));
  },
};
