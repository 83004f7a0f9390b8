"use strict";
// Elements, numbers, colours, and what the address says. Text of a run enters the page as text nodes and nothing else.

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, String(value));
  }
  element.append(...children.flat(9));
  return element;
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function show(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") {
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-4 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Control characters that would vanish or break a line are shown as their symbols.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) =>
    c === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0)));
}

// Okabe and Ito's palette, in an order in which neighbours differ in lightness too, with dashes for what comes after.
const PALETTES = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F"],
  dark: ["#56B4E9", "#E69F00", "#2BC48A", "#E39AC4", "#F0E442", "#F08A5D", "#C9A86A", "#B0B0B0"],
};
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

function theme() {
  return document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function colourOf(i) {
  const palette = PALETTES[theme()];
  return palette[i % palette.length];
}

function dashOf(i) {
  return DASHES[Math.floor(i / PALETTES.light.length) % DASHES.length];
}

function styleOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

// What is looked at is in the address, so that a link leads back to it.
const address = {
  read() {
    return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  },
  write(changes) {
    const next = { ...address.read(), ...changes };
    for (const key of Object.keys(next)) if (next[key] === null || next[key] === "") delete next[key];
    history.replaceState(null, "", "#" + new URLSearchParams(next));
  },
};

const tip = {
  element: null,
  show(text, event) {
    if (!tip.element) document.body.append((tip.element = h("div", { class: "tip", role: "status" })));
    tip.element.textContent = text;
    tip.element.style.display = "block";
    const box = tip.element.getBoundingClientRect();
    tip.element.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
    tip.element.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 8 : event.clientY + 18) + "px";
  },
  hide() {
    if (tip.element) tip.element.style.display = "none";
  },
};

function choice(label, options, value, onchange) {
  const select = h("select", { onchange: () => onchange(select.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label", {}, label, select);
}

// A table whose columns sort: columns are {key, title, number}, rows are objects; `cell` may draw a value.
function sortable(columns, rows, { cell, rowClass, sort } = {}) {
  let [by, down] = sort || [null, false];
  const body = h("tbody");
  const heads = columns.map((column) => {
    const button = h("button", { title: "sort by " + column.title, onclick: () => {
      down = by === column.key ? !down : Boolean(column.number);
      by = column.key;
      draw();
    } }, column.title);
    return h("th", { class: column.number ? "number" : "", scope: "col" }, button);
  });
  function draw() {
    const order = rows.slice();
    if (by !== null) {
      order.sort((a, b) => {
        const [x, y] = [a[by], b[by]];
        if (x === y) return 0;
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        const less = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
        return down ? -less : less;
      });
    }
    columns.forEach((column, i) => heads[i].setAttribute("aria-sort", column.key === by ? (down ? "descending" : "ascending") : "none"));
    body.replaceChildren(...order.map((row) => h("tr", { class: rowClass ? rowClass(row) : "" }, columns.map((column) =>
      h("td", { class: column.number ? "number" : "" }, (cell && cell(column, row)) || show(row[column.key]))))));
  }
  draw();
  return h("table", {}, h("thead", {}, h("tr", {}, heads)), body);
}
