"use strict";
const at = (id) => document.getElementById(id);
const DELAY_MILLISECONDS = 300;
const NUM_TARGETS = 4;
const source = at("source"), target = at("target"), key = at("key");
let settings, model, timer, controller;
// Last answer: the source, layout between sentences, and sentences with their targets.
let answer = { text: "", layout: [""], sentences: [] };
// The word under the pointer or focus, the word of the last click, and the sentence of the shown alternatives.
let current = null, pinned = null, open = 0;

// A browser may refuse to store anything.
function remember(store, name, value) {
  try {
    if (value !== undefined) window[store].setItem(name, value);
    return window[store].getItem(name);
  } catch {
    return null;
  }
}

class RefusedError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

async function call(path, body, signal) {
  if (/[^\x21-\x7e]/.test(key.value)) throw new RefusedError("The API key has a character that no key has.", 401);
  const headers = { "Content-Type": "application/json" };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  const response = await fetch(path, body && { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.ok) return response.json();
  const { error } = await response.json().catch(() => ({}));
  throw new RefusedError(error ?? `The server answers with status ${response.status}.`, response.status, Number(response.headers.get("Retry-After")));
}

function say(text, isWrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", isWrong);
}

function fields() {
  const [source_lang, target_lang] = ["source-lang", "target-lang"].map((id) => at(id).value || null);
  return { model: model.name, source_lang, target_lang };
}

function wait(milliseconds = DELAY_MILLISECONDS) {
  clearTimeout(timer);
  timer = setTimeout(translate, milliseconds);
}

async function translate() {
  clearTimeout(timer);
  controller?.abort();
  // An answer counts only while its controller is the last one.
  const own = (controller = new AbortController()), text = source.value.toWellFormed(), limit = settings.max_text_characters;
  target.setAttribute("aria-busy", "false");
  if (!text.trim()) return show({ text, layout: [""], sentences: [] }), say("");
  if (Array.from(text).length > limit) return fail(new RefusedError(`The text must have at most ${limit.toLocaleString("en")} characters.`));
  if (settings.needs_key && !key.value) return fail(new RefusedError("Enter an API key.", 401));
  target.setAttribute("aria-busy", "true");
  try {
    const num_targets = at("wants-more").checked ? Math.min(NUM_TARGETS, settings.max_targets) : 1;
    const result = await call("ui/translate", { ...fields(), text, num_targets }, own.signal);
    if (own !== controller) return;
    key.removeAttribute("aria-invalid");
    show({ ...result, text });
    say(result.num_unfinished ? "A target met the length limit and is cut." : "", true);
  } catch (error) {
    if (own === controller) fail(error);
  } finally {
    if (own === controller) target.setAttribute("aria-busy", "false");
  }
}

function fail(error) {
  let text = error.message;
  if (!(error instanceof RefusedError)) text = "The server does not answer. Check the connection.";
  if (error.status === 401) key.setAttribute("aria-invalid", "true");
  if (error.retryAfter) {
    text = `The server is busy. The page tries again in ${error.retryAfter} s.`;
    wait(1000 * error.retryAfter);
  }
  target.classList.add("stale");
  say(text, true);
}

function show(result) {
  let offset = result.layout[0].length;
  for (const [index, sentence] of result.sentences.entries()) {
    // `maps` holds the attention of each target.
    Object.assign(sentence, { chosen: 0, start: offset, maps: [] });
    offset += sentence.source.length + result.layout[index + 1].length;
  }
  [answer, pinned, open] = [result, null, 0];
  target.classList.remove("stale");
  draw();
}

const targetText = () => answer.layout[0] + answer.sentences.map((sentence, index) => sentence.targets[sentence.chosen] + answer.layout[index + 1]).join("");

function draw() {
  target.replaceChildren(answer.layout[0]);
  for (const [index, sentence] of answer.sentences.entries()) {
    let number = 0;
    for (const part of sentence.targets[sentence.chosen].split(/(\s+)/)) {
      if (!part.trim()) {
        target.append(part);
        continue;
      }
      const word = element("span", part, target);
      word.className = "word";
      Object.assign(word, { role: "button", tabIndex: index + number ? -1 : 0 });
      Object.assign(word.dataset, { sentence: index, word: number++ });
    }
    target.append(answer.layout[index + 1]);
  }
  at("spoken").textContent = targetText();
  at("copy").hidden = !navigator.clipboard || !answer.sentences.length;
  look(null);
  drawAlternatives();
}

function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  parent.append(made);
  return made;
}

function drawAlternatives() {
  const list = at("alternatives"), sentence = answer.sentences[open];
  list.replaceChildren();
  at("more").hidden = !sentence;
  if (!sentence || !at("wants-more").checked) return;
  if (answer.sentences.length > 1) {
    element("li", sentence.source, list).dir = "auto";
    element("li", "Choose a word of another sentence to see its alternatives.", list);
  }
  for (const [index, text] of sentence.targets.entries()) {
    if (index === sentence.chosen) continue;
    const button = element("button", text, element("li", "", list));
    Object.assign(button, { type: "button", dir: "auto", lang: target.lang });
    button.addEventListener("click", () => {
      sentence.chosen = index;
      draw();
      list.querySelector("button")?.focus();
    });
  }
  if (sentence.targets.length < 2) element("li", "The search found no other target.", list);
}

// The direction of a text does not reach the words around it.
const isolate = (text) => `\u2068${text}\u2069`;

function drawMirror(sentence, words = [], weights = []) {
  const text = source.value, mirror = at("mirror"), highest = Math.max(...weights);
  let offset = 0;
  mirror.replaceChildren();
  for (const [index, word] of words.entries()) {
    if (weights[index] < 0.05 * highest) continue;
    const start = sentence.start + word.index;
    mirror.append(text.slice(offset, start));
    element("mark", word[0], mirror).style.setProperty("--weight", weights[index] / highest);
    offset = start + word[0].length;
  }
  // A last line break needs a line of its own.
  mirror.append(text.slice(offset) + "\n");
}

// Marks the source words that a target word attends to.
async function look(word) {
  current = word;
  for (const element of target.querySelectorAll(".active, .pinned")) element.classList.remove("active", "pinned");
  pinned?.classList.add("pinned");
  word?.classList.add("active");
  drawMirror();
  at("reading").textContent = answer.sentences.length && model.has_attention ? "Choose a word of the target to see the source words that it attends to." : "";
  if (!word || !model.has_attention || source.value !== answer.text) return;
  const sentence = answer.sentences[word.dataset.sentence], texts = { source: sentence.source, target: sentence.targets[sentence.chosen] };
  if (!sentence.maps[sentence.chosen]) {
    // The pointer may only pass.
    await new Promise((resolve) => setTimeout(resolve, 80));
    if (word !== current) return;
  }
  try {
    const map = await (sentence.maps[sentence.chosen] ??= call("ui/attention", { ...fields(), ...texts }));
    if (word !== current || source.value !== answer.text) return;
    const words = [...sentence.source.matchAll(/\S+/g)], weights = map.weights[word.dataset.word];
    if (words.length !== map.source_words.length || !weights) return;
    drawMirror(sentence, words, weights);
    const best = words.map((match, index) => [weights[index], match[0]]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    const shares = best.filter(([weight]) => weight >= 0.01).map(([weight, text]) => `${isolate(text)} ${Math.round(100 * weight)} %`);
    at("reading").textContent = `${isolate(word.textContent)} ← ${shares.join(", ") || "special tokens only"}`;
  } catch (error) {
    delete sentence.maps[sentence.chosen];
    if (word === current) at("reading").textContent = error instanceof RefusedError ? error.message : "The server does not answer.";
  }
}

function pin(word) {
  pinned = word === pinned ? null : word;
  if (word) {
    open = Number(word.dataset.sentence);
    drawAlternatives();
  }
  look(pinned);
}

function move(event) {
  const word = event.target.closest(".word"), words = [...target.querySelectorAll(".word")];
  const isReversed = getComputedStyle(target).direction === "rtl";
  const steps = { ArrowRight: isReversed ? -1 : 1, ArrowLeft: isReversed ? 1 : -1 };
  if (event.key === "Escape") pin(null);
  if (word && (event.key === "Enter" || event.key === " ")) pin(word);
  else if (word && event.key in steps) words[words.indexOf(word) + steps[event.key]]?.focus();
  else return;
  event.preventDefault();
}

function fill(select, options, value) {
  select.replaceChildren();
  for (const { code, name } of options) element("option", name, select).value = code;
  if (options.some(({ code }) => code === value)) select.value = value;
  select.disabled = options.length < 2;
  select.hidden = !options.length;
}

function setModel(name, sourceLang = "en", targetLang = navigator.language.split("-")[0]) {
  model = settings.models.find((item) => item.name === name);
  at("model").value = name;
  fill(at("source-lang"), model.source_languages, sourceLang);
  const others = model.target_languages.filter(({ code }) => code !== at("source-lang").value);
  fill(at("target-lang"), model.target_languages, others.some(({ code }) => code === targetLang) ? targetLang : others[0]?.code);
  at("source-title").textContent = model.source_languages.length ? "From" : "Source";
  at("target-title").textContent = model.target_languages.length ? "To" : "Target";
  setLanguages();
}

function setLanguages() {
  source.lang = at("source-lang").value;
  target.lang = at("target-lang").value;
  at("swap").hidden = !findSwapped();
  at("example").textContent = `Example: ${isolate(settings.examples[source.lang])}`;
  count();
  translate();
}

function findSwapped() {
  const has = (languages, id) => languages.some(({ code }) => code === at(id).value);
  const fits = (item) => has(item.source_languages, "target-lang") && has(item.target_languages, "source-lang");
  return fits(model) ? model : settings.models.find(fits);
}

function swap() {
  const [{ name }, sourceLang, targetLang] = [findSwapped(), at("source-lang").value, at("target-lang").value];
  if (answer.sentences.length) source.value = targetText();
  setModel(name, targetLang, sourceLang);
}

function count() {
  const length = Array.from(source.value).length;
  at("count").textContent = `${length.toLocaleString("en")} / ${settings.max_text_characters.toLocaleString("en")}`;
  at("clear").hidden = !length;
  at("example").hidden = length || !(source.lang in settings.examples);
  pinned = null;
  look(null);
}

function setTheme(theme) {
  const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (theme) document.documentElement.dataset.theme = theme;
  at("theme").textContent = isDark ? "Light theme" : "Dark theme";
  at("theme").onclick = () => setTheme(remember("localStorage", "metaphrase-theme", isDark ? "light" : "dark") ?? (isDark ? "light" : "dark"));
}

function listen() {
  source.addEventListener("input", (event) => {
    count();
    // An unfinished character of an input method is no text yet.
    if (!event.isComposing) wait();
  });
  source.addEventListener("compositionend", () => wait());
  target.addEventListener("pointerover", (event) => event.pointerType === "mouse" && look(event.target.closest(".word") ?? pinned));
  target.addEventListener("pointerleave", () => look(pinned));
  target.addEventListener("focusin", (event) => {
    for (const word of target.querySelectorAll(".word[tabindex='0']")) word.tabIndex = -1;
    event.target.tabIndex = 0;
    look(event.target);
  });
  target.addEventListener("focusout", () => look(pinned));
  target.addEventListener("click", (event) => event.target.closest(".word") && pin(event.target.closest(".word")));
  target.addEventListener("keydown", move);
  at("key-field").addEventListener("submit", (event) => event.preventDefault());
  key.addEventListener("change", () => {
    remember("sessionStorage", "metaphrase-key", key.value);
    translate();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(remember("localStorage", "metaphrase-theme")));
  at("model").addEventListener("change", () => setModel(at("model").value, at("source-lang").value, at("target-lang").value));
  for (const id of ["source-lang", "target-lang"]) at(id).addEventListener("change", setLanguages);
  at("wants-more").addEventListener("change", translate);
  at("swap").addEventListener("click", swap);
  for (const [id, text] of [["clear", () => ""], ["example", () => settings.examples[source.lang]]])
    at(id).addEventListener("click", () => {
      source.value = text();
      count();
      translate();
      source.focus();
    });
  at("copy").addEventListener("click", () => navigator.clipboard.writeText(targetText()).then(() => say("Copied."), () => say("The browser does not let the page copy.", true)));
}

async function start() {
  setTheme(remember("localStorage", "metaphrase-theme"));
  try {
    settings = await call("ui/settings");
  } catch (error) {
    return fail(error);
  }
  key.value = remember("sessionStorage", "metaphrase-key") ?? "";
  at("key-field").hidden = !settings.needs_key;
  fill(at("model"), settings.models.map(({ name }) => ({ code: name, name })));
  setModel(settings.models[0].name);
  listen();
}

start();
