"use strict";
// The worst rollouts of a run, those that monitors flag, and the groups that were given up, each with its reason.

const MOST_WORST = 10;
const MOST_FLAGGED = 100;

const failures = {
  run: 0,
  view(app) {
    const { runs } = app.content;
    if (!runs[this.run]) this.run = 0;
    this.app = app;
    const holder = h("div", { "aria-live": "polite" }, h("p", { class: "dim" }, "reading ..."));
    const load = async () => {
      const run = this.run;
      try {
        const index = await app.source.index(run);
        if (run === this.run) holder.replaceChildren(...this.parts(index).filter(Boolean));
      } catch (error) {
        holder.replaceChildren(h("p", { class: "none" }, String(error.message || error)));
      }
    };
    load();
    return h("section", {}, runs.length > 1 ? h("div", { class: "bar" }, choice("run", runs.map((run, i) => [String(i), run.label]), String(this.run), (value) => { this.run = Number(value); load(); })) : null, holder);
  },
  parts(index) {
    if (!index.step.length && !index.failed.length) return [h("p", { class: "none" }, "This run has no records of rollouts (write_records=true writes them).")];
    const places = index.step.map((_, i) => i);
    // Without a reward first, then the lowest, of equal ones the newest: as in the terminal.
    const rank = (i) => (index.reward[i] === null ? -Infinity : index.reward[i]);
    const worst = [...places].sort((a, b) => rank(a) - rank(b) || index.step[b] - index.step[a] || a - b).slice(0, MOST_WORST);
    const flagged = places.filter((i) => index.flags[i]).reverse();
    return [
      h("p", {}, this.sentence(index, flagged)),
      h("h2", {}, `The ${worst.length} worst rollouts`), this.table(index, worst),
      flagged.length ? h("h2", {}, `Flagged by monitors (${flagged.length})`) : null, flagged.length ? this.table(index, flagged.slice(0, MOST_FLAGGED)) : null,
      index.failed.length ? h("h2", {}, `Groups that were given up (${index.failed.length})`) : null, index.failed.length ? this.givenUp(index.failed) : null,
    ];
  },
  sentence(index, flagged) {
    const timeouts = index.timeouts.reduce((a, b) => a + b, 0);
    const slowest = index.slowest_s.filter(isNumber).sort((a, b) => a - b);
    const at = (share) => show(slowest[Math.min(slowest.length - 1, Math.floor(share * slowest.length))]);
    const times = slowest.length ? `; environments took ${at(0.5)} s to answer (median of each rollout's slowest turn), ${at(0.95)} s at the 95th percentile, ${show(slowest[slowest.length - 1])} s at most` : "";
    return `${index.step.length} rollouts, ${index.failed.length} groups given up, ${timeouts} timeouts, ${flagged.length} flagged by monitors${times}.`;
  },
  table(index, places) {
    const heads = ["rollout", "reward", "why", "env seconds", "it begins"];
    const row = (i) => h("tr", {},
      h("td", {}, h("button", { title: "turn by turn", onclick: () => this.open(index, i) }, `${index.step[i]}-${index.group[i]}-${index.member[i]}`)),
      h("td", { class: "number" }, index.reward[i] === null ? "none" : show(index.reward[i])), h("td", { class: "why" }, index.why[i]),
      h("td", { class: "number" }, index.env_s[i] === null ? "" : show(index.env_s[i])), h("td", {}, index.text[i].slice(0, 100)));
    return h("div", { class: "scroll" }, h("table", { class: "failures" }, h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, places.map(row))));
  },
  givenUp(groups) {
    const row = (group) => h("tr", {}, h("td", {}, `${group.step}-${group.group}`), h("td", {}, group.errors.map(([kind, message]) => h("div", {}, `${kind}: ${message}`))));
    return h("div", { class: "scroll" }, h("table", { class: "failures" }, h("thead", {}, h("tr", {}, ["group", "errors"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, [...groups].reverse().slice(0, MOST_FLAGGED).map(row))));
  },
  open(index, i) {
    browser.run = this.run;
    address.write({ run: String(this.run), rollout: `${index.step[i]}-${index.group[i]}-${index.member[i]}` });
    this.app.open("rollouts");
  },
};
