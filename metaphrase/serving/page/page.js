const NUM_TARGETS = 4;
const key = at("key");
let settings, model, controller;
// Last answer: the source, layout between sentences, and sentences with their targets.
let answer = { text: "", layout: [""], sentences: [] };
// The word under the pointer or focus, the word of the last click, and the sentence of the shown alternatives.
let current = null, pinned = null, open = 0;

// A browser may refuse to store anything.
function rememberKey(value) {
  try {
    if (value !== undefined) sessionStorage.setItem("metaphrase-key", value);
    return sessionStorage.getItem("metaphrase-key") ?? "";
  } catch {
    return "";
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

function fields() {
  const [source_lang, target_lang] = ["source-lang", "target-lang"].map((id) => at(id).value || null);
  return { model: model.name, source_lang, target_lang };
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
    timer = setTimeout(translate, 1000 * error.retryAfter);
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

function draw() {
  target.replaceChildren(answer.layout[0]);
  for (const [index, sentence] of answer.sentences.entries()) {
    const text = sentence.targets[sentence.chosen];
    appendWords(text, wordsOf(text), { sentence: index });
    target.append(answer.layout[index + 1]);
  }
  at("spoken").textContent = target.textContent;
  offerWords();
  look(null);
  drawAlternatives();
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

function wordsOf(text, offset = 0) {
  return Array.from(text.matchAll(/\S+/g), ({ 0: word, index }) => ({ start: offset + index, end: offset + index + word.length }));
}

// A last line break needs a line of its own.
const drawMirror = (words, weights) => drawMarks(at("mirror"), source.value + "\n", words, weights);

// Marks the source words that a target word attends to.
async function look(word) {
  current = word;
  for (const element of target.querySelectorAll(".active, .pinned")) element.classList.remove("active", "pinned");
  pinned?.classList.add("pinned");
  word?.classList.add("active");
  drawMirror([], []);
  at("reading").textContent = answer.sentences.length && model.has_attention ? "Choose a word of the target to see the source words that it attends to." : "";
  if (!word || !model.has_attention || source.value !== answer.text) return;
  const sentence = answer.sentences[word.sentence], texts = { source: sentence.source, target: sentence.targets[sentence.chosen] };
  if (!sentence.maps[sentence.chosen]) {
    // The pointer may only pass.
    await new Promise((resolve) => setTimeout(resolve, 80));
    if (word !== current) return;
  }
  try {
    const map = await (sentence.maps[sentence.chosen] ??= call("ui/attention", { ...fields(), ...texts }));
    if (word !== current || source.value !== answer.text) return;
    const words = wordsOf(sentence.source, sentence.start), weights = map.weights[word.index];
    if (words.length !== map.source_words.length || !weights) return;
    drawMirror(words, weights);
    const best = map.source_words.map((text, index) => [weights[index], text]).sort((a, b) => b[0] - a[0]).slice(0, 3);
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
    open = word.sentence;
    drawAlternatives();
  }
  look(pinned);
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
  at("example").value = settings.examples[source.lang];
  at("example").textContent = `Example: ${isolate(at("example").value)}`;
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
  if (answer.sentences.length) source.value = target.textContent;
  setModel(name, targetLang, sourceLang);
}

function count() {
  showLength(settings.max_text_characters);
  at("example").hidden = source.value || !(source.lang in settings.examples);
  pinned = null;
  look(null);
}

function listen() {
  listenToTexts({ count, translate, choose: pin });
  target.addEventListener("pointerover", (event) => event.pointerType === "mouse" && look(event.target.closest(".word") ?? pinned));
  target.addEventListener("pointerleave", () => look(pinned));
  target.addEventListener("focusin", (event) => look(event.target));
  target.addEventListener("focusout", () => look(pinned));
  at("key-field").addEventListener("submit", (event) => event.preventDefault());
  key.addEventListener("change", () => {
    rememberKey(key.value);
    translate();
  });
  at("model").addEventListener("change", () => setModel(at("model").value, at("source-lang").value, at("target-lang").value));
  for (const id of ["source-lang", "target-lang"]) at(id).addEventListener("change", setLanguages);
  at("wants-more").addEventListener("change", translate);
  at("swap").addEventListener("click", swap);
}

async function start() {
  try {
    settings = await call("ui/settings");
  } catch (error) {
    return fail(error);
  }
  key.value = rememberKey();
  at("key-field").hidden = !settings.needs_key;
  fill(at("model"), settings.models.map(({ name }) => ({ code: name, name })));
  setModel(settings.models[0].name);
  listen();
}

start();
