// Parts of two pages, this one and that of `metaphrase serve`: a source that is typed, and a target of words to choose.
"use strict";
const at = (id) => document.getElementById(id);
const DELAY_MILLISECONDS = 300;
const source = at("source"), target = at("target");
let timer;

function say(text, isWrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", isWrong);
}

function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  parent.append(made);
  return made;
}

function showLength(most) {
  const length = Array.from(source.value).length;
  at("count").textContent = `${length.toLocaleString("en")} / ${most.toLocaleString("en")}`;
  at("clear").hidden = !length;
}

// Append a text to the target. Its words can be chosen, and have fields.
function appendWords(text, words, fields) {
  let offset = 0;
  for (const [index, { start, end }] of words.entries()) {
    target.append(text.slice(offset, start));
    const word = element("span", text.slice(start, end), target);
    Object.assign(word, { className: "word", role: "button", tabIndex: -1, index, ...fields });
    offset = end;
  }
  target.append(text.slice(offset));
}

// Let the Tab key reach the first word.
function offerWords() {
  const first = target.querySelector(".word");
  if (first) first.tabIndex = 0;
  at("copy").hidden = !first || !navigator.clipboard;
}

// Write a text in which words have marks by their weights.
function drawMarks(holder, text, words, weights) {
  const highest = Math.max(...weights);
  let offset = 0;
  holder.replaceChildren();
  for (const [index, { start, end }] of words.entries()) {
    if (weights[index] < 0.05 * highest) continue;
    holder.append(text.slice(offset, start));
    const mark = element("mark", text.slice(start, end), holder);
    mark.style.setProperty("--weight", weights[index] / highest);
    mark.title = `${Math.round(100 * weights[index])} %`;
    offset = end;
  }
  holder.append(text.slice(offset));
}

// Call functions of a page: `count` after each change of the source, `translate` a moment later, and `choose` for a word of the
// target, or null to leave all words.
function listenToTexts({ count, translate, choose }) {
  const wordOf = (event) => event.target.closest(".word");
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(translate, DELAY_MILLISECONDS);
  };
  source.addEventListener("input", (event) => {
    count();
    // An unfinished character of an input method is no text yet.
    if (!event.isComposing) wait();
  });
  source.addEventListener("compositionend", wait);
  const replace = (text) => {
    source.value = text;
    count();
    translate();
    source.focus();
  };
  at("clear").addEventListener("click", () => replace(""));
  at("example")?.addEventListener("click", () => replace(at("example").value));
  target.addEventListener("click", (event) => wordOf(event) && choose(wordOf(event)));
  target.addEventListener("focusin", (event) => {
    for (const word of target.querySelectorAll(".word[tabindex='0']")) word.tabIndex = -1;
    event.target.tabIndex = 0;
  });
  target.addEventListener("keydown", (event) => {
    const word = wordOf(event), words = [...target.querySelectorAll(".word")];
    const isReversed = getComputedStyle(target).direction === "rtl";
    const steps = { ArrowRight: isReversed ? -1 : 1, ArrowLeft: isReversed ? 1 : -1 };
    if (event.key === "Escape") choose(null);
    else if (word && (event.key === "Enter" || event.key === " ")) choose(word);
    else if (word && event.key in steps) words[words.indexOf(word) + steps[event.key]]?.focus();
    else return;
    event.preventDefault();
  });
  const failCopy = () => say("The browser does not let the page copy.", true);
  at("copy").addEventListener("click", () => navigator.clipboard.writeText(target.textContent).then(() => say("Copied."), failCopy));
}
