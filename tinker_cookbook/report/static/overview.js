"use strict";
// What came of it: of several runs the ranking, of one what it moved; then curves of that, what looks wrong, and all numbers.

const MOST_TILES = 4;
const MOST_CHARTS = 3;

const overview = {
  view(app) {
    const { runs, ranking } = app.content;
    if (runs.length > 1) return h("section", {}, rankingOf(app, ranking), healthOfAll(app), runs.map((run, i) => h("details", { class: "run" }, h("summary", {}, swatchOf(app, i), run.label, " ", stateOf(run)), oneRun(app, run, false))));
    return h("section", {}, oneRun(app, runs[0], true));
  },
};

function stateOf(run) {
  return h("span", { class: "state " + run.status, title: run.error || "" }, run.status);
}

function swatchOf(app, run) {
  return h("span", { class: "swatch", style: `background:${colourOf(app.styleOf(run))}` });
}

function oneRun(app, run, alone) {
  return [tilesOf(run), alone ? chartsOf(app, run) : null, summaryOf(run), h("h2", {}, "Health"), findingsOf(run), finalTable(run, alone)];
}

// What a run moved, large.
function tilesOf(run) {
  if (!run.result.length) return h("p", { class: "none" }, run.metrics.step.length ? "This run measures nothing that says how good it is; its curves are under Curves." : "No step is done yet.");
  return h("div", { class: "tiles" }, run.result.slice(0, MOST_TILES).map((change) => tileOf(change)));
}

// A change is called better or worse where the two 95 % intervals lie apart, and not where chance may have made it.
function tileOf({ key, name, where, mode, before, after }) {
  const number = (value) => show(rounded(value));
  const last = after || before;
  const moved = after ? after.mean - before.mean : null;
  const known = after && before.low !== null && after.low !== null;
  const apart = known && (before.high < after.low || after.high < before.low);
  const verdict = apart && mode ? ((moved > 0) === (mode === "max") ? "better" : "worse") : null;
  const judged = moved === null ? "measured once" : [h("span", { class: verdict || "" }, `${moved < 0 ? "\u2212" : "+"}${number(Math.abs(moved))}${verdict ? ", " + verdict : ""}`), known && !apart ? h("span", { class: "dim" }, ", may be chance") : null];
  return h("div", { class: "tile", title: `${key}, ${where}` }, h("div", { class: "dim" }, `${name}, ${where}`),
    h("div", { class: "big" }, after ? [h("span", { class: "dim" }, number(before.mean), " \u2192 "), number(after.mean)] : number(before.mean)),
    h("div", { class: "small" }, judged),
    last.low === null ? null : h("div", { class: "small dim" }, `95 %: ${number(last.low)} to ${number(last.high)}`));
}

function rounded(value) {
  return Number(value.toPrecision(3));
}

function chartsOf(app, run) {
  const keys = run.result.map((change) => change.key).filter((key) => run.metrics[key].filter(isNumber).length > 1).slice(0, MOST_CHARTS);
  return h("div", { class: "charts" }, keys.map((key) => lazily(h("div", { class: "chart", "data-metric": key }), (box) => drawChart(box, app, key, { x: "step", smoothing: 0, bands: true, height: 150 }))));
}

// The settings of several runs, the best first, and the curves by which they are ranked.
function rankingOf(app, ranking) {
  const { runs } = app.content;
  if (!ranking || !ranking.rows.length) return h("p", { class: "none" }, "Nothing that these runs measure says which is better: choose a metric under Runs.");
  const ends = { max: "higher", min: "lower" };
  const said = `${ranking.metric}, the ${ranking.value} value of each run; ${ends[ranking.mode]} is better` + (ranking.rows.some((row) => row.seeds > 1) ? "; means over seeds" : "");
  const rows = ranking.rows.map((row, i) => h("tr", { class: i === 0 ? "best" : "" },
    h("td", { class: "number" }, String(i + 1)), h("td", { class: "setting" }, h("div", {}, swatchOf(app, row.runs[0]), h("span", {}, runs[row.runs[0]].name))),
    h("td", { class: "number" }, h("b", {}, show(rounded(row.mean))), row.std === null ? null : h("span", { class: "dim" }, ` ± ${show(Number(row.std.toPrecision(2)))}`)),
    h("td", { class: "number" }, String(row.seeds)), h("td", {}, h("button", { title: "its rollouts", onclick: () => { browser.run = row.best_run; address.write({ run: String(row.best_run), rollout: null }); app.open("rollouts"); } }, runs[row.best_run].label))));
  const left = ranking.left_out.length ? h("p", { class: "dim" }, "Not ranked: " + ranking.left_out.map((i) => `${runs[i].label} (${runs[i].status})`).join(", ")) : null;
  const chart = lazily(h("div", { class: "chart" }), (box) => drawChart(box, app, ranking.metric, { x: "step", smoothing: 0, bands: true, height: 220 }));
  return h("div", { class: "ranking" }, h("div", {}, h("h2", {}, "Ranking"), h("p", { class: "dim" }, said),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "setting", "mean ± std", "seeds", "best run"].map((name, i) => h("th", { scope: "col", class: [0, 2, 3].includes(i) ? "number" : "" }, name)))), h("tbody", {}, rows))), left), chart);
}

// What looks wrong in any of them, a line per thing.
function healthOfAll(app) {
  const found = new Map();
  app.content.runs.forEach((run) => run.health.filter((finding) => finding.level !== "fine").forEach((finding) => {
    const key = finding.level + finding.what;
    found.set(key, { ...finding, runs: [...(found.get(key) || { runs: [] }).runs, run] });
  }));
  const one = (finding) => h("details", { class: "finding " + finding.level }, h("summary", {}, h("span", { class: "level" }, LEVELS[finding.level]), h("b", {}, finding.what), `${finding.runs.length} of ${app.content.runs.length} runs`),
    h("ul", {}, finding.runs.map((run) => h("li", {}, `${run.label}: ${run.health.find((other) => other.what === finding.what).sentence}`))));
  return [h("h2", {}, "Health"), found.size ? [...found.values()].map(one) : h("p", { class: "dim" }, "Nothing looks wrong in any of them."), h("h2", {}, "Each run")];
}

function summaryOf(run) {
  const steps = run.metrics.step;
  const [done, tokens, seconds] = ["progress/done_frac", "progress/sampled_tokens", "progress/seconds"].map((key) => lastOf(run.metrics[key]));
  const place = run.config.base_url ? `on ${run.config.base_url}` : null;
  const told = [run.recipe, run.config.model_name, place, steps.length ? `step ${steps[steps.length - 1]}` : "no step yet", done !== null ? `${Math.round(100 * done)} % done` : null,
    tokens !== null ? `${tokens.toLocaleString("en")} tokens sampled` : null, ...costOf(run), seconds !== null ? timeOf(seconds) : null];
  return h("p", {}, stateOf(run), " ", told.filter(Boolean).join(", "), h("br"), h("span", { class: "dim" }, run.folder));
}

// Tokens that were thrown away and trained on, and dollars where prices are known.
function costOf(run) {
  const kinds = [["thrown_away", "thrown away"], ["trained", "trained"]];
  const counted = kinds.map(([kind, name]) => [lastOf(run.metrics[`tokens/cumulative/${kind}`]), name]).filter(([count]) => count);
  const dollars = lastOf(run.metrics["cost/cumulative_usd"]);
  return [...counted.map(([count, name]) => `${count.toLocaleString("en")} ${name}`), ...(dollars === null ? [] : [`$${dollars.toFixed(dollars < 1 ? 4 : 2)}`])];
}

function timeOf(seconds) {
  return seconds < 120 ? `${seconds.toFixed(0)} s` : seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const LEVELS = { bad: "wrong", look: "look at it", fine: "fine" };

// What is fine is folded away under a line.
function findingsOf(run) {
  const curves = (finding) => finding.keys.some((key) => run.metrics[key]) ? h("button", { onclick: () => { charts.filter = commonPart(finding.keys.filter((key) => run.metrics[key])); app.open("curves"); } }, "curves") : null;
  const one = (finding) => h("div", { class: "finding " + finding.level }, h("span", { class: "level" }, LEVELS[finding.level]), h("b", {}, finding.what), finding.sentence, " ", curves(finding));
  const fine = run.health.filter((finding) => finding.level === "fine");
  if (!run.health.length) return h("p", { class: "dim" }, "Nothing that this run measures can be judged.");
  return [run.health.filter((finding) => finding.level !== "fine").map(one),
    fine.length ? h("details", { class: "fine" }, h("summary", {}, `${fine.length} fine: ${fine.map((finding) => finding.what).join(", ")}`), fine.map(one)) : null];
}

function commonPart(keys) {
  let common = keys[0];
  for (const key of keys) while (!key.startsWith(common)) common = common.slice(0, -1);
  return common.length > 3 ? common : keys[0];
}

function finalTable(run, open) {
  const keys = Object.keys(run.metrics).filter((key) => /^(env\/all|test|train_mean_nll|dpo_loss|accuracy)/.test(key) && run.metrics[key].some(isNumber));
  const rows = keys.map((key) => {
    const values = run.metrics[key].filter(isNumber);
    const late = values.slice(-5);
    const centre = mean(late);
    const spread = late.length > 2 ? 1.96 * Math.sqrt(late.reduce((sum, v) => sum + (v - centre) ** 2, 0) / (late.length - 1) / late.length) : null;
    return { key, first: values[0], last: values[values.length - 1], late: centre, spread: spread === null ? null : `± ${show(spread)}`, low: Math.min(...values), high: Math.max(...values) };
  });
  if (!rows.length) return null;
  return h("details", { open: open && rows.length < 40 }, h("summary", {}, `What was measured (${rows.length})`), h("div", { class: "scroll" },
    sortable([{ key: "key", title: "metric" }, { key: "first", title: "first", number: true }, { key: "last", title: "last", number: true }, { key: "late", title: "mean of last 5", number: true }, { key: "spread", title: "95 %", number: true }, { key: "low", title: "lowest", number: true }, { key: "high", title: "highest", number: true }], rows)));
}
