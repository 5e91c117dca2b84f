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
