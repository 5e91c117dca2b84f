"""Pictures of the pages in docs/life/. `draw_NAME` draws that of the page NAME, from the variables of its code."""

from matplotlib.colors import LinearSegmentedColormap


def set_colors(panel, theme: dict) -> None:
    """Give a panel the colors of a light or dark page."""
    panel.set_facecolor(theme["page"])
    panel.tick_params(which="both", colors=theme["text"], labelsize=9, length=0)
    panel.spines[:].set_color(theme["line"])
    panel.title.set_color(theme["text"])
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set_color(theme["text"])


def draw_table(panel, values, rows: list[str], columns: list[str], theme: dict) -> None:
    """Draw positive values as a table of colored cells. The largest value has the strongest color."""
    colors = LinearSegmentedColormap.from_list(theme["page"], [theme["page"], theme["loss"]])
    panel.imshow(values, cmap=colors, vmin=0)
    panel.set_xticks(range(len(columns)), columns, rotation=45, ha="left", rotation_mode="anchor")
    panel.set_yticks(range(len(rows)), rows)
    panel.set_xticks([column + 0.5 for column in range(len(columns) - 1)], minor=True)
    panel.set_yticks([row + 0.5 for row in range(len(rows) - 1)], minor=True)
    panel.grid(which="minor", color=theme["line"], linewidth=0.5)
    set_colors(panel, theme)
    panel.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False)


def draw_embeddings(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(6, 4.6)
    panel = figure.subplots()
    draw_table(panel, page["similarity"].clamp(min=0), page["words"], page["words"], theme)
    panel.set_xlabel("cosine of two rows of the table", fontsize=10)


def draw_positions(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(7.2, 2.5)
    buckets = page["relative"].bucket(page["torch"].arange(24)[None] - page["torch"].arange(24)[:, None])
    frequencies = page["model"].model.encoder.rotary_emb.inv_freq
    tables = {
        "sinusoidal table": (page["table"][:40, :64], "entry", "position"),
        "buckets of T5": (buckets, "key", "query"),
        "rotary cosines": ((page["torch"].arange(40)[:, None] * frequencies).cos(), "pair", "distance"),
    }
    for panel, (title, (values, columns, rows)) in zip(figure.subplots(1, 3), tables.items(), strict=True):
        panel.imshow(values, cmap="viridis", aspect="auto", interpolation="nearest")
        panel.set(title=title, xlabel=columns, ylabel=rows)
        set_colors(panel, theme)


def draw_self_attention(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(6, 6)
    tokens = readable(page["tokenizer"], page["ids"][0])
    for head, panel in enumerate(figure.subplots(2, 2).flat):
        weights = page["output"].attentions[-1][0, head]
        draw_table(panel, weights, tokens, tokens, theme)
        panel.set_xlabel(f"head {head}", fontsize=10)


def draw_padding(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(7.2, 3.6)
    tokens = readable(page["tokenizer"], page["batch"].input_ids[0])
    for title, panel in zip(("masked", "unmasked"), figure.subplots(1, 2), strict=True):
        draw_table(panel, page[title].attentions[0][0].mean(dim=0), tokens, tokens, theme)
        panel.set_xlabel(f"{title}, mean of the heads", fontsize=10)


def draw_causal(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(7.2, 2.6)
    tokenizer, pair = page["tokenizer"], page["pair"]
    source = [*readable(tokenizer, pair.input_ids[0]), "<pad>", "<pad>"]
    target = readable(tokenizer, page["decoder_ids"][0])
    is_token = page["torch"].tensor([token != "<pad>" for token in source])
    tables = {
        "encoder": (source, source, is_token.expand(8, 8)),
        "decoder": (target, target, page["is_visible"]),
        "cross-attention": (target, source, is_token.expand(6, 8)),
    }
    for panel, (title, (rows, columns, mask)) in zip(figure.subplots(1, 3), tables.items(), strict=True):
        draw_table(panel, mask, rows, columns, theme)
        panel.set_xlabel(title, fontsize=10)


def readable(tokenizer, ids) -> list[str]:
    """Return the text of each token."""
    return [tokenizer.decode([token_id]).strip() for token_id in ids]


def draw_cross_attention(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(6, 6)
    source, target = (readable(page["tokenizer"], ids[0]) for ids in (page["inputs"].input_ids, page["labels"]))
    for head, panel in enumerate(figure.subplots(2, 2).flat):
        draw_table(panel, page["weights"][0, head], target, source, theme)
        panel.set_xlabel(f"head {head}", fontsize=10)


def draw_lines(panel, lines: dict[str, list], theme: dict, style: str = "-") -> None:
    """Draw two lines over 1, 2, 3, ... with a legend."""
    for (name, values), color in zip(lines.items(), (theme["loss"], theme["score"]), strict=True):
        panel.plot(range(1, len(values) + 1), values, style, color=color, label=name, linewidth=1.6, markersize=4)
    panel.legend(labelcolor=theme["text"], facecolor=theme["page"], edgecolor=theme["line"], fontsize=9)
    set_colors(panel, theme)


def draw_decoder_block(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(7.2, 2.6)
    for index, (title, panel) in enumerate(zip(("states", "gradients"), figure.subplots(1, 2), strict=True)):
        draw_lines(panel, {f"{name}-norm": sizes[index] for name, sizes in page["sizes"].items()}, theme, "-o")
        panel.set(title=f"size of the {title}", xlabel="decoder layer", ylim=(0, None))


def draw_output(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(6, 3.4)
    panel, vocab, share = figure.subplots(), page["logits"].shape[-1], page["share"]
    p = page["torch"].linspace(0.6, 0.9999, 300)
    # The tokens that are no label share the rest of the probability evenly.
    loss, other_loss, other_share = -p.log(), -((1 - p) / (vocab - 1)).log(), share * (vocab - 1) / vocab
    smoothed = (1 - other_share) * loss + other_share * other_loss
    curves = {"smoothed loss": (smoothed, "smoothed", "score"), "loss": (loss, "losses", "loss")}
    for label, (curve, dots, color) in curves.items():
        panel.plot(p, curve, color=theme[color], label=label, linewidth=1.6)
        panel.plot((-page["losses"]).exp(), page[dots], "o", color=theme[color], markeredgecolor=theme["page"])
    panel.axvline(1 - share, color=theme["line"], linestyle="--", linewidth=1)
    panel.legend(labelcolor=theme["text"], facecolor=theme["page"], edgecolor=theme["line"], fontsize=9)
    panel.set(xlabel="probability of the label", ylabel="loss", ylim=(0, None))
    set_colors(panel, theme)


def draw_choosing(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(7.2, 3)
    sources = {"The cat is black.": page["probabilities"], "The cat is very.": page["unsure"]}
    for panel, (source, probabilities) in zip(figure.subplots(1, 2), sources.items(), strict=True):
        best, tokens = probabilities.topk(10)
        nucleus = len(page["top_p"](probabilities, 0.9))
        colors = [theme["score"] if rank < nucleus else theme["line"] for rank in range(len(best))]
        panel.bar(range(len(best)), best, color=colors)
        panel.axvline(4.5, color=theme["loss"], linestyle="--", linewidth=1)
        panel.text(4.4, 1, "top-k 5", color=theme["loss"], fontsize=9, ha="right", va="top")
        panel.text(4.8, 1, f"top-p 0.9 keeps {nucleus}", color=theme["score"], fontsize=9, va="top")
        panel.set_xticks(range(len(best)), readable(page["tokenizer"], tokens), rotation=60, ha="right")
        panel.set(title=source, yscale="log", ylim=(1e-4, 1.2))
        set_colors(panel, theme)


def draw_cache(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(6, 3)
    panel = figure.subplots()
    # The fastest of nine steps hides pauses of the machine.
    windows = {name: page["torch"].tensor(seconds).unfold(0, 9, 1) for name, seconds in page["seconds"].items()}
    draw_lines(panel, {name: 1000 * window.amin(dim=1) for name, window in windows.items()}, theme)
    panel.set(xlabel="decoding step", ylabel="milliseconds", ylim=(0, None))


def draw_t5_sizes(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(7.2, 3)
    panel, names = figure.subplots(), page["names"]
    parts = [part for part in page["shares"]["t5-small"] if "norms" not in part]
    colors = LinearSegmentedColormap.from_list("parts", [theme["score"], theme["line"], theme["loss"]])
    start = [0.0] * len(names)
    for index, part in enumerate(parts):
        shares, color = [page["shares"][name][part] for name in names], colors(index / (len(parts) - 1))
        panel.barh(names, shares, left=start, color=color, label=part, edgecolor=theme["page"])
        start = [left + share for left, share in zip(start, shares, strict=True)]
    panel.invert_yaxis()
    panel.set(xlabel="percent of the parameters", xlim=(0, 100))
    figure.legend(
        loc="outside right", labelcolor=theme["text"], facecolor=theme["page"], edgecolor=theme["line"], fontsize=9
    )
    set_colors(panel, theme)


def draw_decoder_only(figure, theme: dict, page: dict) -> None:
    figure.set_size_inches(7.2, 2.9)
    tokens, S = readable(page["tokenizer"], page["sequence"]), page["S"]
    causal = page["torch"].ones(len(tokens), len(tokens)).tril()
    split, prefix = causal.clone(), causal.clone()
    split[:S, :S], split[S:, :S], prefix[:S, :S] = 0.8, 0.4, 1
    tables = {"encoder-decoder": split, "decoder-only": causal, "prefix language model": prefix}
    panels = figure.subplots(1, 3)
    for panel, (title, mask) in zip(panels, tables.items(), strict=True):
        draw_table(panel, mask, tokens, tokens, theme)
        panel.set_xlabel(title, fontsize=10)
        panel.tick_params(labelsize=7)
    for row, name in ((S / 2 - 0.5, "encoder"), (1.5 * S - 0.5, "cross-attention")):
        panels[0].text(S / 2 - 0.5, row, name, color=theme["text"], fontsize=7, ha="center", va="center")
