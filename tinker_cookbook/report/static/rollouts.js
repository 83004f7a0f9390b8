"use strict";
// The rollouts of a run: filter them, open one, colour its tokens, see its group, and a debate as a debate.

const COLOURINGS = [["none", "no colour"], ["advantage", "advantage"], ["sampled", "logprob when sampled"], ["trainer", "logprob of the trainer"], ["difference", "trainer minus sampled"]];
const ROW_HEIGHT = 24;
const LIST_COLUMNS = "3.2em 3.4em 2.4em 3.8em 4.8em 4.8em 1fr";

const browser = {
  run: 0,
  filters: { steps: "", group: "", low: "", high: "", verdict: "", stop: "", tags: "", text: "" },
  colouring: "advantage",
  hits: null,
  searching: 0,
  view(app) {
    const asked = address.read();
    if (asked.run !== undefined && app.content.runs[asked.run]) this.run = Number(asked.run);
    if (!app.content.runs[this.run]) this.run = 0;
    this.app = app;
    this.detail = h("div", { "aria-live": "polite" }, h("p", { class: "none" }, "Choose a rollout."));
    this.count = h("span", { class: "dim count", role: "status" });
    this.list = h("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "rollouts" });
    this.list.addEventListener("scroll", () => this.drawRows());
    this.list.addEventListener("keydown", (event) => this.step(event));
    this.bar = h("div", { class: "bar" });
    this.load();
    const head = h("div", { class: "cols", style: `grid-template-columns:${LIST_COLUMNS}` }, ["step", "group", "no.", "tokens", "reward", "adv.", "outcome"].map((name) => h("span", {}, name)));
    return h("section", {}, this.bar, h("div", { class: "two" }, h("div", {}, this.count, head, this.list), this.detail));
  },
  async load() {
    const run = this.run;
    try {
      const take = (index) => {
        if (run !== this.run) return;
        this.index = index;
        this.filter();
      };
      this.index = emptyIndex();
      this.count.textContent = "reading ...";
      this.drawBar();
      take(await this.app.source.index(run, take));
      this.drawBar();
      const asked = address.read();
      if (asked.rollout) {
        const at = this.found.findIndex((i) => `${this.index.step[i]}-${this.index.group[i]}-${this.index.member[i]}` === asked.rollout);
        if (at >= 0) this.list.scrollTop = Math.max(0, at * ROW_HEIGHT - this.list.clientHeight / 2);
        this.open(...asked.rollout.split("-").map(Number));
      }
    } catch (error) {
      this.count.textContent = String(error.message || error);
    }
  },
  async refresh() {
    // A run that goes on has new steps; what is looked at stays.
    const run = this.run;
    const index = await this.app.source.index(run);
    if (run === this.run && index.step.length !== this.index.step.length) {
      this.index = index;
      this.filter(true);
    }
  },
  drawBar() {
    const { runs } = this.app.content;
    const kinds = (name) => [...new Set(this.index[name].filter((value) => value !== null && value !== ""))].sort();
    const input = (name, label, attributes = {}) => {
      const element = h("input", { value: this.filters[name], "aria-label": label, placeholder: label, size: 9, ...attributes,
        oninput: () => { this.filters[name] = element.value; this.filter(); } });
      return element;
    };
    const any = (name, label) => kinds(name).length > 1 || this.filters[name] ? choice(label, [["", "any"], ...kinds(name).map((kind) => [kind, kind])], this.filters[name], (value) => { this.filters[name] = value; this.filter(); }) : null;
    const text = h("input", { type: "search", value: this.filters.text, placeholder: "text in it, then Enter", "aria-label": "text in it", size: 22,
      onchange: () => { this.filters.text = text.value; this.searchText(); } });
    this.bar.replaceChildren(...[
      runs.length > 1 ? choice("run", runs.map((run, i) => [String(i), run.label]), String(this.run), (value) => {
        this.run = Number(value); this.hits = null; this.filters.text = ""; address.write({ run: value, rollout: null }); this.load();
      }) : null,
      input("steps", "steps (3 or 2-5)"), input("group", "group", { size: 6 }), input("low", "reward from", { size: 9 }), input("high", "to", { size: 5 }),
      any("verdict", "verdict"), any("stop", "end"), any("tags", "tag"), text,
      choice("colour by", COLOURINGS, this.colouring, (value) => { this.colouring = value; this.recolour(); }),
    ].filter(Boolean));
  },
  async searchText() {
    const mine = ++this.searching;
    this.hits = this.filters.text ? new Set() : null;
    this.filter();
    if (!this.hits) return;
    try {
      let last = performance.now();
      await this.app.source.search(this.run, this.filters.text, (step, hits) => {
        if (mine !== this.searching) return false;
        for (const [group, member] of hits) this.hits.add(`${step}-${group}-${member}`);
        if (performance.now() - last > 200) {
          last = performance.now();
          this.filter(true);
          this.count.append(` searching, at step ${step}`);
        }
        return true;
      });
    } catch (error) {
      this.count.textContent = String(error.message || error);
      return;
    }
    if (mine === this.searching) this.filter(true);
  },
  filter(stay) {
    const { filters, index } = this;
    const [from, to] = rangeOf(filters.steps);
    const [low, high] = [filters.low === "" ? -Infinity : Number(filters.low), filters.high === "" ? Infinity : Number(filters.high)];
    const found = [];
    for (let i = 0; i < index.step.length; i++) {
      const reward = index.reward[i];
      if (index.step[i] < from || index.step[i] > to) continue;
      if (filters.group !== "" && index.group[i] !== Number(filters.group)) continue;
      if ((filters.low !== "" || filters.high !== "") && !(reward !== null && reward >= low && reward <= high)) continue;
      if (filters.verdict && index.verdict[i] !== filters.verdict) continue;
      if (filters.stop && index.stop[i] !== filters.stop) continue;
      if (filters.tags && index.tags[i] !== filters.tags) continue;
      if (this.hits && !this.hits.has(`${index.step[i]}-${index.group[i]}-${index.member[i]}`)) continue;
      found.push(i);
    }
    this.found = found;
    const all = index.step.length;
    this.count.textContent = all ? `${found.length} of ${all} rollouts` : "This run has no records of rollouts (write_records=true writes them).";
    if (!stay) this.list.scrollTop = 0;
    this.list.replaceChildren(h("div", { style: `height:${found.length * ROW_HEIGHT}px` }));
    this.drawRows();
  },
  // Only the rows in view are elements, however many there are.
  drawRows() {
    const { index, found } = this;
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(found.length, first + Math.ceil(this.list.clientHeight / ROW_HEIGHT) + 16);
    const spacer = this.list.firstChild;
    const rows = [];
    for (let place = first; place < last; place++) {
      const i = found[place];
      const id = `${index.step[i]}-${index.group[i]}-${index.member[i]}`;
      const ended = index.stop[i] === "completed" ? null : index.stop[i];
      const outcome = [index.verdict[i], index.trained[i] ? null : "left out", ended, index.tags[i]].filter(Boolean).join(", ");
      rows.push(h("div", { class: "row" + (id === this.shown ? " chosen" : ""), role: "option", "data-id": id, title: outcome, "aria-selected": String(id === this.shown), style: `top:${place * ROW_HEIGHT}px;grid-template-columns:${LIST_COLUMNS}`,
        onclick: () => this.open(index.step[i], index.group[i], index.member[i]) },
      [index.step[i], index.group[i], index.member[i], index.tokens[i], show(index.reward[i]), show(index.advantage[i]), outcome].map((value) => h("span", {}, String(value)))));
    }
    this.list.replaceChildren(spacer, ...rows);
  },
  step(event) {
    const change = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!change || !this.found.length) return;
    event.preventDefault();
    const at = this.found.findIndex((i) => `${this.index.step[i]}-${this.index.group[i]}-${this.index.member[i]}` === this.shown);
    const next = Math.max(0, Math.min(this.found.length - 1, at + change));
    const i = this.found[next];
    const top = next * ROW_HEIGHT;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    if (top > this.list.scrollTop + this.list.clientHeight - ROW_HEIGHT) this.list.scrollTop = top - this.list.clientHeight + ROW_HEIGHT;
    this.open(this.index.step[i], this.index.group[i], this.index.member[i]);
  },
  async open(step, group, member) {
    this.shown = `${step}-${group}-${member}`;
    address.write({ rollout: this.shown, run: String(this.run) });
    this.drawRows();
    let members;
    try {
      members = await this.app.source.group(this.run, step, group);
    } catch (error) {
      members = null;
      this.detail.replaceChildren(h("p", { class: "none" }, String(error.message || error)));
      return;
    }
    if (this.shown !== `${step}-${group}-${member}`) return;
    if (!members || !members.length) {
      this.detail.replaceChildren(h("p", { class: "none" }, this.app.source.missing(this.run)));
      return;
    }
    this.members = members;
    this.place = [step, group, member];
    this.drawDetail();
  },
  recolour() {
    if (this.members) this.drawDetail();
  },
  drawDetail() {
    const [step, group, member] = this.place;
    const one = this.members.find((m) => m.member === member) || this.members[0];
    const debate = debateOf(this.members, one);
    const title = h("h2", {}, debate ? `Step ${step}, group ${group}, ${titleOf(debate)}` : `Step ${step}, group ${group}, member ${one.member}`);
    const others = h("div", { class: "bar" }, "group:", this.members.map((m) => h("button", { "aria-pressed": String(m.member === one.member), title: `reward ${show(m.reward)}`, onclick: () => this.open(step, group, m.member) }, `${m.member}: ${show(m.reward)}`)));
    const body = debate ? debateView(debate, this.colouring) : [factsOf(one), turnsOf(one, this.colouring)];
    this.detail.replaceChildren(title, others, legendOf(this.colouring, debate || [one]), ...[body].flat(3).filter(Boolean));
  },
};

function rangeOf(text) {
  const found = text.trim().match(/^(\d+)(?:\s*-\s*(\d+))?$/);
  if (!found) return [-Infinity, Infinity];
  return [Number(found[1]), Number(found[2] ?? found[1])];
}

// The members of the same debate; null for a rollout of something else.
function debateOf(members, one) {
  const own = one.info && one.info.debate;
  return own === undefined || own === null ? null : members.filter((m) => m.info && m.info.debate === own);
}

function titleOf(debate) {
  const { protocol } = debate[0].info;
  return `${protocol.replaceAll("_", " ")} of ${debate.length > 1 ? "members" : "member"} ${debate.map((m) => m.member).join(" and ")}`;
}

// Where one answer is judged, the verdict is about it and not about who speaks better.
function verdictText({ verdict, info }) {
  if (info.accepted !== undefined) return verdict;
  const single = info.protocol !== "debate" && !info.assigned_answers;
  if (single && verdict === "A") return "A: the answer holds";
  if (single && verdict === "B") return "B: the answer does not hold";
  return verdict || "none";
}

function debateView(debate, colouring) {
  const { question, assigned_answers: assigned, measured_verdicts: measured, judge } = debate[0].info;
  const said = (text) => h("pre", { class: "said prompt", dir: "auto" }, visible(String(text)));
  const wide = (title, ...content) => h("div", { class: "wide" }, h("b", {}, title), ...content);
  const eachJudged = debate[0].info.accepted !== undefined;
  const cells = [];
  if (question) cells.push(wide("Question", said(question)));
  if (assigned) cells.push(wide("Assigned answers", said(Object.entries(assigned).map(([seat, answer]) => `${seat}: ${answer}`).join("\n"))));
  for (const m of debate) {
    const won = m.verdict === m.info.agent || m.info.accepted === true;
    const outcome = eachJudged ? `answer ${m.verdict}` : won ? "winner" : null;
    const title = [m.info.agent, m.info.role === "debater" ? null : m.info.role, outcome].filter(Boolean).join(", ");
    cells.push(h("div", {}, h("h2", { class: won ? "won" : "" }, title), factsOf(m)));
  }
  const rounds = [...new Set(debate.flatMap((m) => m.info.rounds))].sort((a, b) => a - b);
  for (const round of rounds) {
    cells.push(wide(round === 0 ? (debate.length > 1 ? "Answers" : "Answer") : `Speeches, round ${round}`));
    for (const m of debate) {
      const place = m.info.rounds.indexOf(round);
      cells.push(place < 0 ? h("div", { class: "dim" }, "says nothing here") : turnOf(m.turns[place], place, colouring, true, "what the other said, and the words of the round"));
    }
  }
  if (eachJudged) {
    for (const m of debate) cells.push(h("div", {}, h("b", {}, `Verdict on ${m.info.agent}'s answer: ${m.verdict}`), m.info.judge ? said(`checked step ${m.info.judge}`) : null));
  } else {
    cells.push(wide(`Verdict: ${verdictText(debate[0])}`, judge ? said(judge) : null));
  }
  if (measured) cells.push(wide("Only measured", said(Object.entries(measured).map(([name, verdict]) => `${name}: ${verdict}`).join("\n"))));
  return [h("div", { class: "debate", style: `grid-template-columns:repeat(${debate.length}, minmax(0, 1fr))` }, cells)];
}

function factsOf(one) {
  const { agent, judge, debate, rounds, assigned_answers, measured_verdicts, ...info } = one.info || {};
  const facts = { reward: one.reward, advantage: one.advantage, trained: one.trained, end: one.stop, "weights after": `${one.weights} updates`, ...(one.seat ? { role: one.seat } : {}), ...one.metrics, ...info };
  const rows = Object.entries(facts).filter(([, value]) => value !== null && value !== "" && value !== undefined);
  return h("details", { open: rows.length < 9 }, h("summary", {}, `reward ${show(one.reward)}, advantage ${show(one.advantage)}, ${one.trained ? "trained on" : "not trained on"}, ${one.stop || ""}`),
    h("table", {}, h("tbody", {}, rows.map(([key, value]) => h("tr", {}, h("td", { class: "dim" }, key), h("td", { class: "wrap", dir: "auto" }, visible(show(value))))))));
}

function turnsOf(one, colouring) {
  return one.turns.map((turn, i) => turnOf(turn, i, colouring, false));
}

function turnOf(turn, number, colouring, folded, between = "answer of the environment") {
  const told = { ...turn.metrics, ...turn.logs };
  const label = number === 0 ? "prompt" : turn.extends ? between : "new prompt, which does not continue the turn before";
  const prompt = h("details", { open: !folded && turn.prompt.length < 4000 }, h("summary", { class: "dim" }, `${label}, ${turn.prompt_tokens} tokens with all before`), h("pre", { class: "said prompt", dir: "auto" }, visible(turn.prompt)));
  const facts = Object.entries(told);
  const more = facts.length ? h("details", {}, h("summary", {}, `${facts.length} metrics and logs`), h("table", {}, h("tbody", {}, facts.map(([key, value]) =>
    h("tr", {}, h("td", { class: "dim" }, key), h("td", { class: "wrap", dir: "auto" }, visible(show(value)))))))) : null;
  return h("div", { class: "turn" }, prompt,
    h("div", { class: "head" }, h("span", {}, `turn ${number + 1}: ${turn.tokens.length} tokens`), h("span", {}, `end: ${turn.stop}`), h("span", {}, `reward ${show(turn.reward)}`), turn.masked ? h("span", {}, "masked: not trained on") : null, more),
    stripOf(turn, colouring));
}

function valuesOf(turn, colouring) {
  if (colouring === "none") return null;
  if (colouring !== "difference") return turn[colouring];
  return turn.trainer && turn.sampled ? turn.trainer.map((value, i) => (isNumber(value) ? value - turn.sampled[i] : null)) : null;
}

// The tokens of a reply, each as dark as its number: blue above zero, orange below; logprobs darker the less likely.
function stripOf(turn, colouring) {
  const values = valuesOf(turn, colouring);
  const most = values ? Math.max(1e-12, ...values.filter(isNumber).map(Math.abs)) : 1;
  const strip = h("pre", { class: "said reply", dir: "auto", "data-coloured": colouring });
  if (!turn.tokens.length) strip.append(h("i", { class: "dim" }, "(nothing)"));
  turn.tokens.forEach((token, i) => {
    const value = values ? values[i] : null;
    const span = h("span", { "data-i": i }, visible(token));
    if (isNumber(value) && value !== 0) span.style.background = colourFor(colouring, value, most);
    strip.append(span);
  });
  strip.addEventListener("mousemove", (event) => {
    const i = event.target.dataset && event.target.dataset.i;
    if (i === undefined) return tip.hide();
    const numbers = ["sampled", "trainer", "advantage"].filter((name) => turn[name] && isNumber(turn[name][i])).map((name) => `${name} ${show(turn[name][i])}`);
    tip.show([`token ${Number(i) + 1}, id ${turn.ids[i]}, ${JSON.stringify(turn.tokens[i])}`, ...numbers].join("\n"), event);
  });
  strip.addEventListener("mouseleave", () => tip.hide());
  if (!values && colouring !== "none") strip.append(h("i", { class: "dim" }, `\n(no ${COLOURINGS.find(([key]) => key === colouring)[1]}: not trained on, or not returned)`));
  return strip;
}

function colourFor(colouring, value, most) {
  const share = colouring === "sampled" || colouring === "trainer" ? Math.min(1, -value / 6) : Math.min(1, Math.abs(value) / most);
  const hue = colouring === "sampled" || colouring === "trainer" ? "--down" : value > 0 ? "--up" : "--down";
  return `rgba(var(${hue}), ${(0.08 + 0.5 * share).toFixed(3)})`;
}

function legendOf(colouring, members) {
  if (colouring === "none") return null;
  const swatch = (hue, alpha) => h("i", { style: `background:rgba(var(${hue}), ${alpha})` });
  if (colouring === "sampled" || colouring === "trainer") return h("p", { class: "legend" }, "certain", swatch("--down", 0.08), swatch("--down", 0.33), swatch("--down", 0.58), "exp(-6) or less likely");
  const values = members.flatMap((m) => m.turns.flatMap((turn) => valuesOf(turn, colouring) || [])).filter(isNumber);
  const range = values.length ? `, from ${show(Math.min(...values))} to ${show(Math.max(...values))}` : "";
  return h("p", { class: "legend" }, "below zero", swatch("--down", 0.5), swatch("--up", 0.5), `above zero${range}; as dark as large in its turn`);
}
