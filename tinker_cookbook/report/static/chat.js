"use strict";
// A conversation with a checkpoint of a run, where the page is served: the process behind it samples.

const chat = {
  run: 0,
  name: null,
  said: [],
  waiting: false,
  view(app) {
    const { runs } = app.content;
    if (!app.content.served) return h("section", {}, h("p", { class: "none" }, "A file cannot sample. python -m recipes.report log_path=... serve=true can: this page with a chat with any checkpoint."));
    this.app = app;
    if (!runs[this.run]) this.run = 0;
    const run = choice("run", runs.map((one, i) => [String(i), one.label]), String(this.run), (value) => { this.run = Number(value); this.name = null; this.settings = null; this.restart(); this.load(); });
    this.bar = h("div", { class: "bar" });
    this.words = h("div", { class: "words", "aria-live": "polite" });
    const line = h("textarea", { rows: 2, placeholder: "say something; Enter sends", "aria-label": "what to say" });
    line.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); } });
    const send = () => { const text = line.value.trim(); if (text && !this.waiting) { line.value = ""; this.send(text); } };
    this.load();
    this.drawWords();
    return h("section", { class: "chat" }, runs.length > 1 ? h("div", { class: "bar" }, run) : null, this.bar, this.words,
      h("div", { class: "say" }, line, h("button", { onclick: send }, "Send"), h("button", { onclick: () => this.restart() }, "New conversation")));
  },
  async load() {
    const run = this.run;
    try {
      const found = await this.app.source.get(`api/chats/${run}`);
      if (run !== this.run) return;
      this.names = found.names;
      this.settings = this.settings || { system: found.system || "", temperature: found.temperature ?? 1, max_tokens: found.max_tokens };
      if (!this.names.includes(this.name)) this.name = this.names[0];
      this.drawBar();
    } catch (error) {
      this.bar.replaceChildren(String(error.message || error));
    }
  },
  drawBar() {
    const field = (key, label, attributes) => {
      const element = h("input", { value: this.settings[key], "aria-label": label, ...attributes, onchange: () => { this.settings[key] = attributes.type === "number" ? Number(element.value) : element.value; if (key === "system") this.restart(); } });
      return h("label", {}, label, element);
    };
    this.bar.replaceChildren(choice("checkpoint", this.names.map((name) => [name, name]), this.name, (value) => { this.name = value; this.restart(); }),
      field("temperature", "temperature", { type: "number", min: 0, step: 0.1 }), field("max_tokens", "longest reply", { type: "number", min: 1, step: 1 }), field("system", "system prompt", { size: 40 }));
  },
  restart() {
    this.said = [];
    this.drawWords();
  },
  async send(text) {
    const said = this.said;
    const mine = { role: "user", content: text };
    said.push(mine);
    this.waiting = true;
    this.drawWords();
    const { system, temperature, max_tokens } = this.settings;
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...said.map(({ role, content }) => ({ role, content }))];
    try {
      const answer = await fetch(`api/chat/${this.run}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ name: this.name, messages, temperature, max_tokens }) });
      if (!answer.ok) throw new Error((await answer.text()) || `status ${answer.status}`);
      said.push({ role: "assistant", name: this.name, ...(await answer.json()) });
    } catch (error) {
      // What could not be answered does not stay in the conversation.
      said.splice(said.indexOf(mine), 1);
      if (said === this.said) this.error = `${text}: ${error.message || error}`;
    }
    this.waiting = false;
    if (said === this.said) this.drawWords();
  },
  drawWords() {
    const one = (message) => message.role === "user" ? h("div", { class: "mine" }, h("pre", { class: "said", dir: "auto" }, visible(message.content))) :
      h("div", { class: "turn" }, h("div", { class: "head" }, h("span", {}, message.name), h("span", {}, `${message.ids.length} tokens`), h("span", {}, message.stop === "length" ? "cut off" : message.clean ? "" : "malformed")), stripOf(message, "sampled"));
    this.words.replaceChildren(...this.said.map(one), ...(this.waiting ? [h("p", { class: "dim" }, "sampling; the first reply of a checkpoint waits until it is loaded ...")] : []), ...(this.error ? [h("p", { class: "worse" }, this.error)] : []),
      ...(this.said.length || this.waiting ? [] : [h("p", { class: "none" }, "Tokens are as dark as they were unlikely; point at one for its logprob.")]));
    this.error = null;
    this.words.scrollTop = this.words.scrollHeight;
  },
};
