"use strict";
// Curves of all metrics: runs of one setting as a mean with the range of its seeds, smoothed, over steps, tokens or time.

const X_AXES = [["step", "step"], ["progress/sampled_tokens", "sampled tokens"], ["progress/trained_tokens", "trained tokens"], ["progress/seconds", "seconds"]];
const FIRST = ["env/all/reward/total", "env/all/correct", "env/all/debate/judge_accuracy", "test/env/all/correct", "train_mean_nll",
  "test/nll", "dpo_loss", "accuracy", "optim/kl_sample_train_v2", "optim/entropy", "optim/grad_norm", "env/all/ac_tokens_per_turn"];

function smoothed(values, weight) {
  // Exponential, with the bias of its beginning taken out (as Adam does); gaps stay gaps.
  if (!weight) return values;
  let last = 0, scale = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    last = weight * last + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return last / scale;
  });
}

// The series of a metric: {label, colour, dash, x, y, low, high}.
function seriesOf(app, key, { x, smoothing, bands }) {
  const found = [];
  const groups = bands ? app.content.seeds : app.content.runs.map((_, i) => [i]);
  groups.forEach((members) => {
    const chosen = members.filter((i) => app.chosen.has(i) && app.content.runs[i].metrics[key]);
    if (!chosen.length) return;
    const points = chosen.map((i) => {
      const metrics = app.content.runs[i].metrics;
      const at = metrics[x] || [];
      const pairs = metrics[key].map((value, j) => [at[j], value]).filter(([a, b]) => isNumber(a) && isNumber(b));
      const values = smoothed(pairs.map(([, b]) => b), smoothing);
      return new Map(pairs.map(([a], j) => [a, values[j]]));
    }).filter((map) => map.size);
    if (!points.length) return;
    const style = app.styleOf(members[0]);
    const label = chosen.length > 1 ? `${settingName(app, chosen[0])} (${chosen.length} seeds)` : app.content.runs[chosen[0]].label;
    const common = { label, colour: colourOf(style), dash: dashOf(style) };
    if (points.length === 1 || x !== "step") {
      // Over tokens or seconds no two seeds share a place; each is a line of its own.
      points.forEach((map) => {
        const at = [...map.keys()].sort((a, b) => a - b);
        found.push({ ...common, x: at, y: at.map((place) => map.get(place)) });
      });
      return;
    }
    const at = [...new Set(points.flatMap((map) => [...map.keys()]))].sort((a, b) => a - b);
    const columns = at.map((place) => points.map((map) => map.get(place)).filter(isNumber));
    found.push({ ...common, x: at, y: columns.map(mean), low: columns.map((c) => Math.min(...c)), high: columns.map((c) => Math.max(...c)) });
  });
  return found;
}

function settingName(app, run) {
  const { setting, label } = app.content.runs[run];
  const told = Object.entries(setting).filter(([key, value]) => key.split(".").pop() !== "seed" && show(flat(value)).length < 40).slice(0, 4).map(([key, value]) => `${key.split(".").pop()}=${show(value)}`);
  return told.length ? told.join(" ") : label;
}

// uPlot wants one x for all series: the union, with gaps.
function aligned(series) {
  const at = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const place = new Map(at.map((value, i) => [value, i]));
  const spread = (one, values) => {
    const row = new Array(at.length).fill(null);
    one.x.forEach((value, i) => { row[place.get(value)] = values[i]; });
    return row;
  };
  const columns = [at], options = [{}], bands = [];
  for (const one of series) {
    const line = { label: one.label, stroke: one.colour, dash: one.dash, width: 1.6, spanGaps: true, points: { show: one.x.length < 30, size: 4 } };
    columns.push(spread(one, one.y));
    options.push(line);
    if (one.low) {
      columns.push(spread(one, one.high), spread(one, one.low));
      const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      options.push(edge, edge);
      bands.push({ series: [columns.length - 2, columns.length - 1], fill: one.colour + "30" });
    }
  }
  return { columns, options, bands };
}

function drawChart(holder, app, key, settings) {
  const series = seriesOf(app, key, settings);
  const values = h("div", { class: "values" });
  const plot = h("div", { role: "img", "aria-label": `curve of ${key}` });
  holder.replaceChildren(h("h3", {}, key), plot, values);
  if (!series.length) {
    values.textContent = "the runs that are chosen have no numbers of it";
    return;
  }
  const { columns, options, bands } = aligned(series);
  const named = options.map((option, i) => [option, i]).filter(([option]) => option.label);
  const tell = (index) => {
    const told = named.map(([option, i]) => {
      const column = columns[i];
      let at = index ?? column.length - 1;
      while (at > 0 && column[at] === null) at--;
      return (named.length > 1 ? option.label + " " : "") + show(column[at]);
    });
    values.textContent = (index === null ? "last: " : `at ${show(columns[0][index])}: `) + told.slice(0, 4).join(", ") + (told.length > 4 ? ", ..." : "");
  };
  const axis = { stroke: styleOf("--dim"), grid: { stroke: styleOf("--line"), width: 1 }, ticks: { stroke: styleOf("--line") } };
  const marks = (u, numbers) => numbers.map((value) => value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : show(value));
  new uPlot({
    width: Math.max(280, holder.clientWidth - 18), height: 180, series: options, bands,
    cursor: { y: false, points: { size: 6 } }, legend: { show: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 28, values: marks }, { ...axis, size: 62, values: marks }],
    hooks: { setCursor: [(u) => tell(u.cursor.idx ?? null)] },
  }, columns, plot);
  tell(null);
}

const charts = {
  settings: { x: "step", smoothing: 0, bands: true },
  filter: "",
  view(app) {
    const holder = h("div");
    const keys = numericKeys(app);
    const axes = X_AXES.filter(([key]) => key === "step" || app.content.runs.some((run) => run.metrics[key]));
    const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: this.settings.smoothing, "aria-label": "smoothing",
      oninput: () => { this.settings.smoothing = Number(smoothing.value); draw(); } });
    const filter = h("input", { type: "search", placeholder: "metric name contains", value: this.filter, "aria-label": "metric name contains",
      oninput: () => { this.filter = filter.value; draw(); } });
    const bands = h("input", { type: "checkbox", checked: this.settings.bands, onchange: () => { this.settings.bands = bands.checked; draw(); } });
    const several = app.content.seeds.some((members) => members.length > 1);
    const draw = () => {
      const wanted = this.filter.trim().toLowerCase();
      const shown = keys.filter((key) => key.toLowerCase().includes(wanted));
      const first = FIRST.filter((key) => shown.includes(key));
      const groups = new Map(first.length && !wanted ? [["first of all", first]] : []);
      for (const key of shown) {
        const name = key.includes("/") ? key.slice(0, key.indexOf("/")) : "others";
        groups.set(name, [...(groups.get(name) || []), key]);
      }
      holder.replaceChildren(...[...groups].map(([name, members], i) => {
        const grid = h("div", { class: "charts" });
        const fill = () => {
          if (grid.childElementCount) return;
          for (const key of members) grid.append(lazily(h("div", { class: "chart", "data-metric": key }), (box) => drawChart(box, app, key, this.settings)));
        };
        const folded = h("details", { class: "group", open: i === 0 || wanted !== "", ontoggle: () => folded.open && fill() }, h("summary", {}, `${name} (${members.length})`), grid);
        if (folded.open) fill();
        return folded;
      }));
      if (!shown.length) holder.append(h("p", { class: "none" }, keys.length ? "No metric has such a name." : "No metrics yet."));
    };
    draw();
    return h("section", {}, h("div", { class: "bar" }, filter, choice("over", axes, this.settings.x, (value) => { this.settings.x = value; draw(); }),
      h("label", {}, "smoothing", smoothing), several ? h("label", {}, bands, "seeds as bands") : null), holder);
  },
};

function numericKeys(app) {
  const keys = new Set();
  for (const run of app.content.runs) for (const [key, values] of Object.entries(run.metrics)) if (key !== "step" && values.some(isNumber)) keys.add(key);
  return [...keys].sort();
}

// Draws when it comes into view: a run has hundreds of metrics.
function lazily(element, draw) {
  const seen = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) {
      seen.disconnect();
      draw(element);
    }
  }, { rootMargin: "300px" });
  seen.observe(element);
  return element;
}
