// Script of the explanation page. It stands inside the page, which loads no file.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
let pair, pinned = null;

// Control characters, marks of direction and halves of surrogate pairs become visible.
const escapes = (character) => "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0");
const shown = (text) => text.replace(/[\p{Cc}\p{Cs}\p{Bidi_Control}]/gu, escapes);
// A token inside a line of text: its direction does not reach the numbers beside it.
const inline = (text) => "\u2068" + shown(text) + "\u2069";
const percent = (share) => (share > 0 && share < 0.01 ? "< 1 %" : Math.round(100 * share) + " %");
const precise = (share) => (100 * share).toPrecision(3) + " %";

function element(name, text, parent, className) {
  const made = document.createElement(name);
  made.textContent = shown(String(text));
  if (className) made.className = className;
  parent.append(made);
  return made;
}

function fill(select, options, value) {
  const last = select.value;
  select.replaceChildren();
  for (const [key, text] of options) element("option", text, select).value = key;
  select.value = value ?? last;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  select.disabled = options.length < 2;
}

// One map of packed values as rows of numbers from 0 to 1; signed values from -1 to 1.
function unpack(packed, indices) {
  packed.decoded ??= Uint8Array.from(atob(packed.bytes), (character) => character.charCodeAt(0));
  const [rows, columns] = packed.shape.slice(-2);
  const sum = new Float64Array(rows * columns);
  for (const index of indices)
    for (let cell = 0; cell < sum.length; cell++) sum[cell] += packed.decoded[index * sum.length + cell];
  const value = (v) => ("largest" in packed ? (v / indices.length - 128) / 127 : v / indices.length / 255);
  return Array.from({ length: rows }, (_, row) => Array.from(sum.subarray(row * columns, (row + 1) * columns), value));
}

// A heat map: point at a cell, tap it, or move with the arrow keys.
function drawMap(figure, values, rowNames, columnNames, describe, legend, isShare) {
  const style = getComputedStyle(document.documentElement), read = {};
  const color = (name) => (read[name] ??= style.getPropertyValue(name).trim());
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  const rows = values.length, columns = values[0].length;
  const width = Math.max(2, Math.min(30, Math.floor((figure.clientWidth - 120) / columns)));
  const size = rowNames && columnNames ? Math.max(width, rows * columns > 3600 ? 4 : 13) : width;
  const height = columnNames ? size : Math.max(4, Math.min(16, Math.floor(480 / rows)));
  context.font = "12px system-ui, sans-serif";
  const short = (text) => (Array.from(text).length > 14 ? Array.from(text).slice(0, 13).join("") + "…" : text);
  const names = [rowNames, columnNames].map((list, side) => (list && (side ? size : height) >= 11 ? list.map((name) => short(shown(name))) : []));
  const [left, top] = names.map((list) => (list.length ? Math.ceil(Math.max(...list.map((name) => context.measureText(name).width))) + 8 : 2));
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const extent = [left + columns * size + 2, top + rows * height + 2];
  canvas.width = extent[0] * scale; canvas.height = extent[1] * scale;
  canvas.style.width = extent[0] + "px"; canvas.style.height = extent[1] + "px";
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", rows + " rows, " + columns + " columns. Move with the arrow keys.");
  const hasGaps = size >= 8 && height >= 8;
  const write = (text, x, y, align, font, ink = "--text") => {
    Object.assign(context, { font: font + "px system-ui, sans-serif", textAlign: align, fillStyle: color(ink) });
    context.fillText(text, x, y);
  };
  const strongest = isShare ? values.flat().reduce((most, value) => Math.max(most, value), 1e-9) : 1;
  context.scale(scale, scale);
  context.textBaseline = "middle";
  names[0].forEach((name, y) => write(name, left - 5, top + (y + 0.5) * height, "right", Math.min(12, height - 2)));
  names[1].forEach((name, x) => {
    context.save();
    context.translate(left + (x + 0.5) * size, top - 5);
    context.rotate(-Math.PI / 2);
    write(name, 0, 0, "left", Math.min(12, size - 2));
    context.restore();
  });
  // One pixel for each cell, enlarged: drawing 512 x 512 rectangles takes seconds.
  const image = new ImageData(columns, rows);
  const [low, high] = ["--low", "--high"].map((name) => color(name).split(" ").map(Number));
  values.flat().forEach((value, index) => {
    const tint = value < 0 ? low : high;
    for (let part = 0; part < 3; part++) image.data[4 * index + part] = tint[part];
    image.data[4 * index + 3] = (255 * 0.85 * Math.abs(value)) / strongest;
  });
  const pixels = document.createElement("canvas");
  Object.assign(pixels, { width: columns, height: rows }).getContext("2d").putImageData(image, 0, 0);
  const area = [left, top, columns * size, rows * height];
  context.fillStyle = color("--panel");
  context.fillRect(...area);
  context.imageSmoothingEnabled = false;
  context.drawImage(pixels, ...area);
  if (hasGaps) {
    for (let x = 1; x <= columns; x++) context.clearRect(left + x * size - 1, top, 1, area[3]);
    for (let y = 1; y <= rows; y++) context.clearRect(left, top + y * height - 1, area[2], 1);
  }
  if (hasGaps && isShare) values.forEach((row, y) => {
    const best = Math.max(...row);
    row.forEach((value, x) => {
      const [x0, y0] = [left + x * size, top + y * height];
      if (size >= 18 && value >= 0.05)
        write(Math.round(100 * value), x0 + (size - 1) / 2, y0 + (height - 1) / 2, "center", 10, value > 0.6 * strongest ? "--ground" : "--text");
      context.strokeStyle = color("--text");
      if (value === best) context.strokeRect(x0 + 0.5, y0 + 0.5, size - 2, height - 2);
    });
  });
  const reading = document.createElement("p");
  reading.className = "reading";
  reading.setAttribute("aria-live", "polite");
  const cell = { row: -1, column: -1 }, frame = document.createElement("i");
  frame.hidden = true;
  function point(row, column) {
    if (row < 0 || column < 0 || row >= rows || column >= columns) return;
    Object.assign(cell, { row, column });
    frame.hidden = false;
    const place = { left: left + column * size - 1, top: top + row * height - 1, width: size + 1, height: height + 1 };
    for (const name in place) frame.style.setProperty(name, place[name] + "px");
    reading.textContent = describe(row, column, values[row][column]);
  }
  const locate = (event) => point(Math.floor((event.offsetY - top) / height), Math.floor((event.offsetX - left) / size));
  canvas.addEventListener("pointermove", (event) => event.pointerType === "mouse" && locate(event));
  canvas.addEventListener("click", locate);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    point(Math.max(0, cell.row + step[0]), Math.max(0, cell.column + step[1]));
  });
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.append(canvas, frame);
  figure.replaceChildren(scroll);
  element("figcaption", legend + (isShare ? " The strongest color is " + percent(strongest) + "." : ""), figure);
  figure.append(reading);
}

function showTokens() {
  at("token-lists").replaceChildren();
  const target = pair.is_generated ? "target (generated)" : "target (given)";
  for (const [name, side] of [["source", pair.source_tokens], ["decoder input", pair.decoder_tokens], [target, pair.target_tokens]]) {
    const list = element("div", "", at("token-lists"), "tokens");
    element("b", name, list);
    side.tokens.forEach((token, index) => element("small", side.ids[index], element("span", token, list, "token")));
  }
}

function showStages() {
  const body = at("stages").tBodies[0];
  body.replaceChildren();
  for (const stage of pair.stages) {
    const row = body.insertRow();
    const parts = stage.name.split(/(?<=\.)/).flatMap((part) => [shown(part), document.createElement("wbr")]);
    element("td", "", row).append(...parts);
    element("td", stage.kind, row);
    element("td", stage.shape.join(" × "), row);
  }
}

const POSITION_TEXTS = {
  added: "The model adds a vector to the embedding of each token: one row for each position, one column for each dimension.",
  rotary: "The model rotates queries and keys by an angle that grows with the position. The map shows the cosines of the angles.",
  bias: "The model adds a number to each attention score. It depends on the distance between query (row) and key (column).",
};

function showPositions() {
  fill(at("position"), pair.positions.map((item, index) => [index, item.name]));
  const item = pair.positions[at("position").value];
  at("position-text").textContent = item ? POSITION_TEXTS[item.kind] + " None is added in cross-attention." : "This model shows none.";
  const heads = item ? item.shape[0] : 1;
  fill(at("position-head"), Array.from({ length: heads }, (_, head) => [head, heads > 1 ? head : "all"]));
  at("position-map").replaceChildren();
  if (!item) return;
  const isBias = item.kind === "bias";
  const names = (count) => Array.from({ length: count }, (_, index) => String(index));
  const [rows, columns] = item.shape.slice(1);
  const describe = (row, column, value) =>
    (isBias ? "query " + row + ", key " : "position " + row + ", dimension ") + column + ": " + (value * item.largest).toFixed(3);
  const legend = "Blue: above 0. Orange: below 0. The strongest color is " + item.largest.toPrecision(3) + ".";
  drawMap(at("position-map"), unpack(item, [at("position-head").value]), names(rows), isBias ? names(columns) : null, describe, legend);
}

const KINDS = {
  encoder: ["encoder self-attention", "Rows and columns are source tokens: each reads the whole source."],
  decoder: ["decoder self-attention", "Rows and columns are tokens that the decoder reads: each reads itself and earlier tokens."],
  cross: ["cross-attention", "Rows are target tokens while the model predicts them, columns are source tokens."],
};
const sidesOf = (kind) => ({
  encoder: [pair.source_tokens, pair.source_tokens],
  decoder: [pair.decoder_tokens, pair.decoder_tokens],
  cross: [pair.target_tokens, pair.source_tokens],
})[kind];

function showMasks() {
  at("mask-maps").replaceChildren();
  const kinds = Object.keys(KINDS).filter((kind) => kind in pair.masks);
  // All figures first: each map takes the width that remains for it.
  const figures = kinds.map(() => element("figure", "", at("mask-maps")));
  kinds.forEach((kind, index) => {
    const [rows, columns] = sidesOf(kind), packed = pair.masks[kind], names = [...columns.tokens];
    while (names.length < packed.shape[3]) names.push("(padding)");
    const describe = (row, column, value) => inline(rows.tokens[row]) + (value ? " reads " : " must not read ") + inline(names[column]);
    drawMap(figures[index], unpack(packed, [0]), rows.tokens, names, describe, KINDS[kind][0]);
  });
}

// Shares of keys are added within a word, those of queries averaged.
function attentionShares() {
  const packed = pair.attentions[at("kind").value], [layers, heads] = packed.shape;
  const chosen = (select, count) => (select.value === "" ? Array.from({ length: count }, (_, i) => i) : [Number(select.value)]);
  const indices = chosen(at("layer"), layers).flatMap((layer) => chosen(at("head"), heads).map((head) => layer * heads + head));
  const shares = unpack(packed, indices), [queries, keys] = sidesOf(at("kind").value);
  if (at("unit").value === "tokens") return shares;
  const counts = queries.words.map((_, word) => queries.word_ids.filter((id) => id === word).length);
  const found = queries.words.map(() => new Array(keys.words.length).fill(0));
  shares.forEach((row, query) => {
    const word = queries.word_ids[query];
    row.forEach((share, key) => (found[word][keys.word_ids[key]] += share / counts[word]));
  });
  return found;
}

let shares = [];
function showAttention() {
  pinned = null;
  at("queries").replaceChildren();
  at("keys").replaceChildren();
  const kind = at("kind").value;
  if (!kind) return at("attention-map").replaceChildren();
  at("kind-text").textContent = KINDS[kind][1];
  shares = attentionShares();
  const unit = at("unit").value, sides = sidesOf(kind);
  ["queries", "keys"].forEach((id, side) => {
    element("b", [kind === "cross" ? "target (query)" : "query", kind === "cross" ? "source (key)" : "key"][side], at(id));
    sides[side][unit].forEach((text, index) => {
      const button = element("button", text, at(id), "token");
      button.type = "button";
      button.tabIndex = index ? -1 : 0;
      button.setAttribute("aria-pressed", "false");
    });
  });
  point(null);
  const [rows, columns] = sides.map((side) => side[unit]);
  const describe = (row, column, share) => inline(rows[row]) + " ← " + inline(columns[column]) + ": " + percent(share);
  const legend = "Color and number: share in percent, from 5 %. Frame: largest share of the row. Each row adds up to 100 %, up to rounding.";
  drawMap(at("attention-map"), shares, rows, columns, describe, legend, true);
}

const buttonsOf = (id) => Array.from(at(id).querySelectorAll("button"));
function point(button) {
  for (const other of [...buttonsOf("queries"), ...buttonsOf("keys")]) {
    other.style.removeProperty("--weight");
    other.removeAttribute("data-percent");
    other.classList.toggle("active", other === button);
    other.setAttribute("aria-pressed", String(other === pinned));
  }
  at("reading").textContent = "";
  if (!button) return;
  const isQuery = button.parentElement.id === "queries", index = buttonsOf(button.parentElement.id).indexOf(button);
  const others = buttonsOf(isQuery ? "keys" : "queries");
  const weights = isQuery ? shares[index] : shares.map((row) => row[index]);
  weights.forEach((weight, place) => {
    others[place].style.setProperty("--weight", Math.min(weight, 1).toFixed(3));
    if (weight >= 0.01) others[place].dataset.percent = percent(weight);
  });
  const best = weights.map((_, place) => place).sort((a, b) => weights[b] - weights[a]).slice(0, 4).filter((place) => weights[place] >= 0.01);
  const said = best.map((place) => inline(others[place].textContent) + " " + percent(weights[place]));
  const rest = 1 - best.reduce((sum, place) => sum + weights[place], 0);
  if (isQuery && rest >= 0.005) said.push("others " + percent(rest));
  if (!said.length) said.push("less than 1 % of each");
  at("reading").textContent = inline(button.textContent) + (isQuery ? " ← " : " → ") + said.join(", ");
}

function walk(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], button = event.target.closest("button.token");
  if (!step || !button) return;
  const line = buttonsOf(button.parentElement.id), next = line[line.indexOf(button) + step];
  if (!next) return;
  event.preventDefault();
  button.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function showLabels() {
  at("loss").textContent = "Mean loss of the labels: " + pair.loss.toFixed(4) + " nats.";
  const body = at("labels").tBodies[0];
  body.replaceChildren();
  pair.target_tokens.tokens.forEach((label, index) => {
    const row = body.insertRow();
    element("td", index, row);
    element("td", pair.decoder_tokens.tokens[index] + "  (" + pair.decoder_tokens.ids[index] + ")", row);
    element("td", label + "  (" + pair.target_tokens.ids[index] + ")", row);
    element("td", precise(pair.probabilities[index]), row, "number bar").style.setProperty("--weight", pair.probabilities[index]);
    element("td", pair.ranks[index], row, "number");
  });
  const row = body.insertRow();
  ["behind", "(padding)", "-100", "ignored", ""].forEach((text) => element("td", text, row, "faint"));
}

function showStep() {
  const steps = pair.paths[at("path").value] ?? [];
  at("step").max = Math.max(0, steps.length - 1);
  const index = Number(at("step").value), step = steps[index], body = at("candidates").tBodies[0];
  at("back").disabled = index === 0;
  at("next").disabled = index >= steps.length - 1;
  body.replaceChildren();
  if (!step) return;
  const tokens = [pair.decoder_tokens.tokens[0], ...steps.slice(0, index).map((s) => s.token)];
  at("prefix").textContent = "Step " + (index + 1) + " of " + steps.length + ", after: " + tokens.map(inline).join(" ");
  let sum = 0;
  step.ids.forEach((id, place) => {
    const row = body.insertRow(), probability = step.probabilities[place];
    sum += probability;
    row.className = id === step.choice ? "chosen" : "";
    element("td", step.tokens[place], row);
    element("td", id, row, "number");
    element("td", precise(probability), row, "number bar").style.setProperty("--weight", probability);
    element("td", precise(sum), row, "number");
    element("td", [place ? "" : "greedy", id === step.beam_choice ? "beam" : "", id === step.choice ? "path" : ""].filter(Boolean).join(", "), row);
    for (const cut of [step.top_k, step.top_p]) {
      const share = cut.probabilities[place];
      element("td", (share ? precise(share) : "cut") + (id === cut.choice ? " ●" : ""), row, "number");
    }
  });
  const cuts = [["Top-k", step.top_k], ["top-p", step.top_p]];
  const draws = cuts.map(([name, cut]) => name + " keeps " + cut.size + " and draws " + inline(cut.token));
  at("drawn").textContent = draws.join("; ") + ". The path takes " + inline(step.token) + ".";
}

const STATES = { kept: "kept for the next step", finished: "finished", pruned: "pruned", open: "still open when the search ended" };
const chain = (index) => (index === null ? [] : [...chain(pair.beam.nodes[index].parent), index]);

function showTree() {
  const { nodes, num_beams } = pair.beam, svg = (name, parent, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    made.textContent = text;
    parent.append(made);
    return made;
  };
  const ranks = {}, spots = [], wide = 124;
  nodes.forEach((node) => { ranks[node.step] = (ranks[node.step] ?? -1) + 1; spots.push([node.step * (wide + 40) + 4, ranks[node.step] * 32 + 4]); });
  const width = Math.max(0, ...spots.map(([x]) => x)) + wide + 6, height = Math.max(0, ...spots.map(([, y]) => y)) + 32;
  const root = svg("svg", at("tree"), { width, height, role: "group", "aria-label": "tree of hypotheses" });
  at("tree").replaceChildren(root);
  nodes.forEach((node, index) => {
    if (node.parent === null) return;
    const [x, y] = spots[index], [left, above] = spots[node.parent];
    svg("path", root, { class: "edge", "data-node": index, d: `M${left + wide} ${above + 13}C${left + wide + 20} ${above + 13} ${x - 20} ${y + 13} ${x} ${y + 13}` });
  });
  nodes.forEach((node, index) => {
    const [x, y] = spots[index];
    const group = svg("g", root, { class: "node " + node.state, "data-node": index, tabindex: -1, role: "button", transform: `translate(${x} ${y})` });
    svg("rect", group, { width: wide, height: 26, rx: 5 });
    const mark = node.rank ? "#" + node.rank : { kept: "", finished: "✓", pruned: "✗", open: "…" }[node.state];
    const token = Array.from(shown(node.token)), most = mark ? 7 : 9;
    const text = token.length > most ? token.slice(0, most - 1).join("") + "…" : token.join("");
    svg("text", group, { x: 6, y: 17 }, text);
    svg("text", group, { x: wide - 6, y: 17, "text-anchor": "end", direction: "ltr" }, (mark ? mark + " " : "") + node.total.toFixed(1));
  });
  const best = nodes.find((node) => node.rank === 1);
  at("beam-text").textContent =
    `Each column is a step with the best candidates of ${num_beams} beams. The number is the sum of log-probabilities. ` +
    "Dashed and ✗: pruned. #1, #2, ...: results by score, the sum divided by a power of the length. ✓: finished, but not among the results. …: open when the search ended.";
  pick(best ? nodes.indexOf(best) : nodes.length ? 0 : null);
}

function pick(index) {
  const path = new Set(chain(index).map(String)), node = pair.beam.nodes[index];
  for (const part of at("tree").querySelectorAll("[data-node]")) {
    part.classList.toggle("path", path.has(part.dataset.node));
    if (part.matches(".node")) part.setAttribute("tabindex", Number(part.dataset.node) === index ? 0 : -1);
  }
  if (!node) return (at("hypothesis").textContent = "");
  const tokens = chain(index).map((step) => inline(pair.beam.nodes[step].token)).join(" ");
  const result = node.rank ? `, result ${node.rank} with score ${node.score.toFixed(4)}` : "";
  at("hypothesis").textContent = `${tokens}: log-probability ${node.total.toFixed(4)}, ${STATES[node.state]}${result}.`;
}

// Up and down within the candidates, left to the hypothesis before, right to its best continuation.
function climb(event) {
  const { nodes } = pair.beam, index = Number(nodeOf(event)?.dataset.node);
  const next = {
    ArrowUp: index - 1, ArrowDown: index + 1, ArrowLeft: nodes[index]?.parent,
    ArrowRight: nodes.findIndex((node) => node.parent === index),
  }[event.key];
  if (!nodes[next]) return;
  event.preventDefault();
  at("tree").querySelector(`.node[data-node="${next}"]`).focus();
}

function layerOptions() {
  const [layers, heads] = pair.attentions[at("kind").value]?.shape ?? [1, 1];
  const numbers = (count) => Array.from({ length: count }, (_, index) => [index, index]);
  const all = layers > 1 ? "mean of all" : "0";
  fill(at("layer"), layers > 1 ? [...numbers(layers), ["", all]] : [["", all]], layers > 1 ? layers - 1 : "");
  fill(at("head"), [["", heads > 1 ? "mean of all" : "0"], ...(heads > 1 ? numbers(heads) : [])], "");
}

function showPair() {
  pair = data.pairs[at("pair").value];
  at("pair-notes").textContent = pair.notes.join(" ");
  fill(at("kind"), Object.keys(KINDS).filter((kind) => kind in pair.attentions).map((kind) => [kind, KINDS[kind][0]]), "cross");
  // Without several words, words say nothing.
  at("unit").value = pair.source_tokens.words.length > 2 ? "words" : "tokens";
  const names = Object.keys(pair.paths);
  fill(at("path"), names.map((name) => [name, name === "target" && pair.is_generated ? "target (generated)" : name]), names[0]);
  at("step").value = 0;
  layerOptions();
  for (const show of [showTokens, showStages, showPositions, showLabels, showStep, showTree]) show();
  redraw();
}

function redraw() {
  for (const show of [showPositions, showMasks, showAttention]) show();
}

at("pairs").hidden = data.pairs.length < 2;
fill(at("pair"), data.pairs.map((item, index) => [index, index + 1 + ": " + Array.from(item.source).slice(0, 24).join("")]), 0);
for (const [id, show] of [["pair", showPair], ["position", showPositions], ["position-head", showPositions],
  ["layer", showAttention], ["head", showAttention], ["unit", showAttention]]) at(id).addEventListener("change", show);
at("kind").addEventListener("change", () => { layerOptions(); showAttention(); });
at("path").addEventListener("change", () => { at("step").value = 0; showStep(); });
at("step").addEventListener("input", showStep);
for (const [id, way] of [["back", -1], ["next", 1]])
  at(id).addEventListener("click", () => { at("step").value = Number(at("step").value) + way; showStep(); });
for (const id of ["queries", "keys"]) {
  const tokenOf = (event) => event.target.closest("button.token");
  at(id).addEventListener("mouseover", (event) => tokenOf(event) && point(tokenOf(event)));
  at(id).addEventListener("mouseleave", () => point(pinned));
  at(id).addEventListener("focusin", (event) => tokenOf(event) && point(tokenOf(event)));
  at(id).addEventListener("focusout", () => point(pinned));
  at(id).addEventListener("keydown", walk);
  at(id).addEventListener("click", (event) => {
    if (!tokenOf(event)) return;
    pinned = pinned === tokenOf(event) ? null : tokenOf(event);
    point(pinned);
  });
}
const nodeOf = (event) => event.target.closest(".node");
at("tree").addEventListener("click", (event) => nodeOf(event) && pick(Number(nodeOf(event).dataset.node)));
at("tree").addEventListener("keydown", climb);
at("tree").addEventListener("focusin", (event) => nodeOf(event) && pick(Number(nodeOf(event).dataset.node)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
showPair();
