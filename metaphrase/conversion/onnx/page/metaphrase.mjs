// Text to text in Node and in browsers, by a folder that `metaphrase export --format web` wrote and transformers.js.
//
//   import * as library from "@huggingface/transformers";
//   import { load } from "./model/metaphrase.mjs";
//   const model = await load(library, "./model");
//   console.log((await model.translate("The cat is black.", { num_beams: 4 })).text);

// Memory for attention grows with the square of this number. Models with positions have their own limit.
const MAX_TOKENS_WITHOUT_POSITIONS = 2048;

// Smallest and largest number of an option of `translate`, as in Python.
const LONGEST = 2 ** 20;
const RANGES = {
  __proto__: null, max_length: [2, LONGEST], max_new_tokens: [1, LONGEST], min_length: [0, LONGEST], min_new_tokens: [0, LONGEST],
  num_beams: [1, 10_000], no_repeat_ngram_size: [0, LONGEST], length_penalty: [-10, 10], repetition_penalty: [1e-3, 1e3],
};
const CHOICES = { __proto__: null, early_stopping: [true, false, "never"], do_sample: [false] };

export class TooLongError extends Error {
  constructor(numTokens, limit) {
    super(`The text has ${numTokens} tokens. The model reads at most ${limit}.`);
    Object.assign(this, { numTokens, limit });
  }
}

// Load the model of a folder such as ./model, or of a name on the Hub if one tokenizer serves. `options` are those of
// `from_pretrained`, such as `dtype` ("fp32" or "q8").
export async function load(library, folder, options = {}) {
  const { AutoModelForSeq2SeqLM, AutoTokenizer } = library;
  const source = await AutoTokenizer.from_pretrained(folder, options);
  const subfolder = source.config.target_tokenizer;
  const target = subfolder ? await AutoTokenizer.from_pretrained(`${folder}/${subfolder}`, options) : source;
  const model = await AutoModelForSeq2SeqLM.from_pretrained(folder, { dtype: "q8", ...options });
  return new TextModel(library, model, source, target);
}

export class TextModel {
  constructor(library, model, source, target) {
    Object.assign(this, { library, model, target, reader: source });
    if (source.config.split_special_tokens) {
      // The library reads control tokens such as </s> from a text. In Python they are letters like others.
      const json = source._tokenizerJSON;
      const added_tokens = json.added_tokens.filter((token) => !token.special);
      this.reader = new source.constructor({ ...json, added_tokens }, source.config);
    }
    this.source = source;
    this.settings = model._prepare_generation_config(null, {});
    this.maxSourceTokens = model.config.max_source_tokens ?? MAX_TOKENS_WITHOUT_POSITIONS;
  }

  // Return the target of a text, its ids, and the attention from each target token to each source token. `isFinished` is false if
  // the target met the length limit.
  // `options` are those of `generate()`, such as `num_beams` and `length_penalty`. `onStep` is awaited before each step, and
  // stops the search if it throws.
  async translate(text, { onStep, ...options } = {}) {
    checkOptions(options);
    const sourceIds = this.reader(text, { return_tensor: false }).input_ids;
    if (sourceIds.length > this.maxSourceTokens) throw new TooLongError(sourceIds.length, this.maxSourceTokens);
    // A blank text has a blank target.
    const settings = this.model._prepare_generation_config(null, options);
    const last = text.trim() ? await this.#search(sourceIds, settings, onStep) : null;
    const steps = [];
    for (let node = last; node?.parent; node = node.parent) steps.unshift(node);
    const targetIds = steps.map((step) => step.token);
    const isFinished = !last || [this.settings.eos_token_id].flat().includes(last.token);
    const attention = steps.map((step) => step.attention);
    return { text: this.#decode(this.target, targetIds), isFinished, sourceIds, targetIds, attention };
  }

  // Return the words of a result of `translate` on both sides, each with its place in `sourceText` and `targetText`, and the
  // weights from each target word to each source word. A text of one word is divided into its tokens.
  align({ sourceIds, targetIds, attention }) {
    const source = this.#words(this.source, sourceIds);
    const target = this.#words(this.target, targetIds);
    const weights = target.words.map(({ tokens: rows }) =>
      source.words.map(({ tokens }) =>
        rows.reduce((sum, row) => sum + tokens.reduce((part, token) => part + (attention[row]?.[token] ?? 0), 0), 0) / rows.length));
    return { sourceText: source.text, sourceWords: source.words, targetText: target.text, targetWords: target.words, weights };
  }

  #decode(tokenizer, ids) {
    return ids.length ? tokenizer.decode(ids, { skip_special_tokens: true }) : "";
  }

  #words(tokenizer, ids) {
    const text = this.#decode(tokenizer, ids);
    const ends = ids.map((_, index) => Math.min(this.#decode(tokenizer, ids.slice(0, index + 1)).length, text.length));
    let spans = Array.from(text.matchAll(/\S+/gu), (match) => ({ start: match.index, end: match.index + match[0].length }));
    if (spans.length < 2) {
      spans = ends.map((end, index) => ({ start: ends[index - 1] ?? 0, end })).filter(({ start, end }) => text.slice(start, end).trim());
    }
    const words = spans.map(({ start, end }) => {
      const tokens = [...ids.keys()].filter((token) => (ends[token - 1] ?? 0) < end && ends[token] > start);
      return { start, end, text: text.slice(start, end), tokens };
    });
    return { text, words };
  }

  async #search(sourceIds, settings, onStep) {
    const isBeamSearch = settings.num_beams > 1;
    const ends = [settings.eos_token_id ?? []].flat();
    const maxLength = settings.max_new_tokens ? settings.max_new_tokens + 1 : settings.max_length;
    const processors = this.model._get_logits_processor(settings, 1);
    const decoder = new Decoder(this.library, this.model, sourceIds);
    const start = { token: settings.decoder_start_token_id, parent: null, ids: [BigInt(settings.decoder_start_token_id)], score: 0 };
    const search = new BeamSearch(settings, ends, maxLength);
    for (let nodes = [start]; ; ) {
      await onStep?.();
      const { logits, attention } = await decoder.step(nodes.map((node) => node.token));
      const rows = isBeamSearch ? logits.map(logSoftmax) : logits;
      const scores = processors.processors.length ? this.#process(processors, nodes, rows) : rows;
      nodes = search.advance(nodes, scores, attention);
      if (!nodes.length) return search.best;
      decoder.select(nodes.map((node) => node.row));
    }
  }

  #process(processors, nodes, rows) {
    const { Tensor } = this.library;
    const width = rows[0].length;
    const data = new Float32Array(rows.length * width);
    rows.forEach((row, index) => data.set(row, index * width));
    const scores = processors(nodes.map((node) => node.ids), new Tensor("float32", data, [rows.length, width]));
    return rows.map((_, index) => scores.data.subarray(index * width, (index + 1) * width));
  }
}

// Decoding steps of one source, for a number of rows that `select` changes.
class Decoder {
  constructor(library, model, sourceIds) {
    Object.assign(this, { library, model, sourceIds, past: null });
  }

  // Return the logits and the attention of each row: the mean over the heads of the layer that aligns best.
  async step(tokens) {
    const { Tensor } = this.library;
    const integers = (values, rows) => new Tensor("int64", BigInt64Array.from(values, BigInt), [rows, values.length / rows]);
    const rows = tokens.length, length = this.sourceIds.length;
    const inputs = { decoder_input_ids: integers(tokens, rows), attention_mask: integers(new Array(rows * length).fill(1), rows) };
    if (this.past) {
      // The keys and values of the source are in the cache. Only the shape counts.
      const width = this.model.config.d_model;
      if (this.states?.length !== rows * length * width) this.states = new Float32Array(rows * length * width);
      inputs.encoder_outputs = new Tensor("float32", this.states, [rows, length, width]);
      inputs.past_key_values = this.past;
    } else {
      inputs.input_ids = integers(this.sourceIds, 1);
    }
    const outputs = await this.model.forward(inputs);
    const past = {};
    for (const name of Object.keys(outputs).filter((name) => name.startsWith("present"))) {
      const input = name.replace("present", "past_key_values");
      past[input] = (name.includes("encoder") && this.past?.[input]) || outputs[name];
    }
    this.past = past;
    const width = outputs.logits.dims.at(-1);
    const logits = tokens.map((_, row) => outputs.logits.data.subarray(row * width, (row + 1) * width));
    return { logits, attention: this.#attention(outputs, rows) };
  }

  #attention(outputs, rows) {
    const layers = Object.keys(outputs).filter((name) => name.startsWith("cross_attentions"));
    // Of many layers the next-to-last one aligns best, of few the last one (Garg et al. 2019).
    const name = `cross_attentions.${layers.length > 3 ? layers.length - 2 : layers.length - 1}`;
    if (!outputs[name]) return new Array(rows).fill(null);
    const { data, dims: [, heads, , length] } = outputs[name];
    return Array.from({ length: rows }, (_, row) =>
      Float32Array.from({ length }, (_, token) => {
        let sum = 0;
        for (let head = 0; head < heads; head += 1) sum += data[(row * heads + head) * length + token];
        return sum / heads;
      }));
  }

  // Continue with these rows of the step before.
  select(rows) {
    const { Tensor } = this.library;
    for (const [name, tensor] of Object.entries(this.past)) {
      const numRows = tensor.dims[0], size = tensor.data.length / numRows;
      // The beams of a source share its keys and values.
      const isSame = rows.length === numRows && (name.includes("encoder") || rows.every((row, index) => row === index));
      if (isSame) continue;
      const data = new tensor.data.constructor(rows.length * size);
      rows.forEach((row, index) => data.set(tensor.data.subarray(row * size, (row + 1) * size), index * size));
      this.past[name] = new Tensor(tensor.type, data, [rows.length, ...tensor.dims.slice(1)]);
    }
  }
}

function checkOptions(options) {
  for (const [name, value] of Object.entries(options)) {
    // Ids are those of the tokenizer. Null sets nothing.
    if (value == null || /_ids?$|suppress_tokens$/.test(name)) continue;
    const [low, high] = RANGES[name] ?? [], isWhole = !name.endsWith("penalty");
    const isInRange = value >= low && value <= high && (isWhole ? Number.isInteger : Number.isFinite)(value);
    if (CHOICES[name]?.includes(value) || isInRange) continue;
    const numbers = RANGES[name] && `a ${isWhole ? "whole " : ""}number from ${low} to ${high}`;
    const rule = CHOICES[name]?.join(", ") ?? numbers ?? "an option of greedy search or beam search";
    throw new RangeError(`\`${name}\` must be ${rule}, got ${value}.`);
  }
}

// Beam search as in transformers, for one source: same candidates, same scores, same end. One beam is greedy search.
class BeamSearch {
  constructor({ num_beams, length_penalty, early_stopping }, ends, maxLength) {
    Object.assign(this, { numBeams: num_beams ?? 1, ends, maxLength, earlyStopping: early_stopping, finished: [] });
    this.lengthPenalty = length_penalty ?? 1;
  }

  get best() {
    return this.finished[0]?.node;
  }

  advance(nodes, scores, attention) {
    const numCandidates = this.numBeams > 1 ? Math.max(2, 1 + this.ends.length) * this.numBeams : 1;
    const candidates = topCandidates(nodes, scores, numCandidates).map(({ row, token, score }) => {
      const parent = nodes[row];
      const node = { token, parent, ids: [...parent.ids, BigInt(token)], row, score, attention: attention[row] };
      return { node, isLast: this.ends.includes(token) || node.ids.length >= this.maxLength };
    });
    const length = nodes[0].ids.length;
    for (const { node } of candidates.slice(0, this.numBeams).filter(({ isLast }) => isLast)) {
      this.finished.push({ node, score: node.score / length ** this.lengthPenalty });
    }
    this.finished.sort((left, right) => right.score - left.score);
    this.finished.length = Math.min(this.finished.length, this.numBeams);
    const running = candidates.filter(({ isLast }) => !isLast).map(({ node }) => node).slice(0, this.numBeams);
    if (!running.length) return [];
    if (this.finished.length === this.numBeams) {
      const isNever = this.earlyStopping === "never" && this.lengthPenalty > 0;
      const bestLength = isNever ? this.maxLength - 1 : length;
      const isHopeless = running[0].score / bestLength ** this.lengthPenalty <= this.finished.at(-1).score;
      if (this.earlyStopping === true || isHopeless) return [];
    }
    return running;
  }
}

function logSoftmax(logits) {
  let largest = -Infinity, sum = 0;
  for (const logit of logits) if (logit > largest) largest = logit;
  for (const logit of logits) sum += Math.exp(logit - largest);
  const total = largest + Math.log(sum);
  return logits.map((logit) => logit - total);
}

// Return the best continuations of all nodes, best first.
function topCandidates(nodes, scores, count) {
  const best = [];
  scores.forEach((row, index) => {
    const { score } = nodes[index];
    for (let token = 0; token < row.length; token += 1) {
      const total = score + row[token];
      if (best.length === count && !(total > best[count - 1].score)) continue;
      if (best.length === count) best.pop();
      let place = best.length;
      while (place && best[place - 1].score < total) place -= 1;
      best.splice(place, 0, { row: index, token, score: total });
    }
  });
  return best;
}
