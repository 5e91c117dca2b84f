// The page: text in, text out as it is typed, and the source words of the chosen target word.

import { load, TooLongError } from "./metaphrase.mjs";

const MAX_CHARACTERS = 10_000;
// Between decoding steps the browser draws and takes keys.
const MILLISECONDS_BETWEEN_PAUSES = 30;
const MAX_KEPT_RESULTS = 500;
const results = new Map();
let model, run = 0, active = null;

function refuse(text) {
  at("bar").hidden = true;
  at("phase").textContent = text;
  at("phase").classList.add("wrong");
}

function showProgress(name, loaded, total) {
  // Other files may still load after an error.
  if (at("bar").hidden) return;
  at("phase").textContent = name;
  if (total) Object.assign(at("bar"), { value: Math.min(loaded, total), max: total });
  else at("bar").removeAttribute("value");
}

async function start() {
  let library;
  showProgress("Loading the library");
  try {
    library = await import("./library/transformers.min.js");
    const { env } = library, url = (name) => new URL(`library/${name}`, document.baseURI).href;
    const wasm = "ort-wasm-simd-threaded.wasm", mjs = "ort-wasm-simd-threaded.mjs";
    // No file comes from another server, nor from an older export of the same address.
    Object.assign(env, { allowLocalModels: true, allowRemoteModels: false, useBrowserCache: false, useWasmCache: false });
    env.backends.onnx.wasm.wasmPaths = { wasm: url(wasm), mjs: url(mjs) };
    const response = await fetch(url(wasm));
    if (!response.ok) throw new Error(`${wasm} answers with status ${response.status}`);
    env.backends.onnx.wasm.wasmBinary = await response.arrayBuffer();
  } catch (error) {
    return refuse(`The folder library/ is missing or incomplete. “metaphrase export --format web --library node_modules” copies it. (${error.message})`);
  }
  try {
    const progress_callback = ({ status, loaded, total }) => status === "progress_total" && showProgress("Loading the model", loaded, total);
    model = await load(library, ".", { device: "wasm", progress_callback });
  } catch (error) {
    return refuse(`The model cannot be loaded. The device may have too little memory. (${error?.message ?? error})`);
  }
  at("loading").hidden = true;
  at("options").hidden = false;
  offerSearches();
  source.disabled = false;
  source.focus();
  listenToTexts({ count, translate, choose });
  for (const id of ["search", "splits"]) at(id).addEventListener("change", translate);
  count();
  translate();
}

function offerSearches() {
  const own = model.settings.num_beams ?? 1, beams = own > 1 ? own : 4;
  for (const [value, name] of [[1, "Greedy"], [beams, `${beams} beams`]])
    Object.assign(element("option", name, at("search")), { value, selected: value === own });
}

// Return sentences and the layout between them, in turn: layout, sentence, layout, ...
function split(text) {
  const parts = [""], segmenter = new Intl.Segmenter(undefined, { granularity: "sentence" });
  for (const line of text.split(/(\r\n|\r|\n)/)) {
    const pieces = at("splits").checked ? Array.from(segmenter.segment(line), ({ segment }) => segment) : [line];
    for (const piece of pieces) {
      const sentence = piece.trim(), begin = sentence ? piece.indexOf(sentence) : piece.length;
      parts[parts.length - 1] += piece.slice(0, begin);
      if (sentence) parts.push(sentence, piece.slice(begin + sentence.length));
    }
  }
  return parts;
}

async function translate() {
  clearTimeout(timer);
  const own = (run += 1), text = source.value.toWellFormed(), num_beams = Number(at("search").value);
  const length = Array.from(text).length;
  target.setAttribute("aria-busy", "false");
  if (length > MAX_CHARACTERS) return say(`The text has ${length.toLocaleString("en")} characters. The page takes at most ${MAX_CHARACTERS.toLocaleString("en")}.`, true);
  if (!text.trim()) {
    draw([""]);
    return say("");
  }
  target.setAttribute("aria-busy", "true");
  const parts = split(text), drawn = [...parts];
  const begin = performance.now();
  let last = begin;
  const onStep = async () => {
    if (performance.now() - last > MILLISECONDS_BETWEEN_PAUSES) {
      await new Promise((resolve) => setTimeout(resolve));
      last = performance.now();
    }
    if (own !== run) throw new Error("stopped");
  };
  try {
    let isCut = false;
    for (let index = 1; index < parts.length; index += 2) {
      drawn[index] = await find(parts[index], num_beams, onStep);
      if (own !== run) return;
      isCut ||= drawn[index].isFinished === false;
    }
    draw(drawn);
    const isWrong = isCut || drawn.some((part) => part instanceof TooLongError);
    say(isCut ? "A target met the length limit and is cut." : isWrong ? "A part of the text is too long." : `${Math.round(performance.now() - begin)} ms`, isWrong);
  } catch (error) {
    if (own === run) say(`The model failed: ${error?.message ?? error}`, true);
  } finally {
    if (own === run) target.setAttribute("aria-busy", "false");
  }
}

// Return the result of a sentence, or the error that says that it is too long.
async function find(sentence, num_beams, onStep) {
  const key = `${num_beams} ${sentence}`;
  if (!results.has(key)) {
    const result = await model.translate(sentence, { num_beams, onStep }).catch((error) => {
      if (error instanceof TooLongError) return error;
      throw error;
    });
    if (results.size >= MAX_KEPT_RESULTS) results.delete(results.keys().next().value);
    results.set(key, result);
  }
  return results.get(key);
}

function draw(parts) {
  target.replaceChildren(parts[0]);
  for (let index = 1; index < parts.length; index += 2) {
    const result = parts[index];
    if (result instanceof TooLongError) {
      element("span", `[${result.message}]`, target).className = "wrong";
    } else {
      const map = (result.map ??= model.align(result));
      appendWords(map.targetText, map.targetWords, { map });
    }
    target.append(parts[index + 1]);
  }
  offerWords();
  look(null);
}

// Mark the source words that a target word attends to.
function look(word) {
  active?.classList.remove("active");
  active = word;
  word?.classList.add("active");
  const weights = word?.map.weights[word.index] ?? [], highest = Math.max(0, ...weights);
  at("words").hidden = !highest;
  const hasWords = target.querySelector(".word");
  at("hint").textContent = !hasWords ? "" : !word ? "Choose a word of the target to see its source words." : highest ? `Source words of \u2068${word.textContent}\u2069:` : "This model shows no source words.";
  if (highest) drawMarks(at("words"), word.map.sourceText, word.map.sourceWords, weights);
}

const choose = (word) => look(word === active ? null : word);
const count = () => showLength(MAX_CHARACTERS);

start();
