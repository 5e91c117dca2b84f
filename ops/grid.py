"""The grid of a packed attention: each sequence in a row of its own, in blocks as wide as their longest row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from metaphrase.modeling.packing import Packing, Segments, grid_width

# Scores of one block: they stay in the cache from the first product to the last.
BLOCK_ENTRIES = 2**19


@dataclass(frozen=True)
class Block:
    """Neighbouring sequences, or some heads of one, that are computed at a time.

    Attributes:
        sequences: Which.
        heads: Which of each.
        query_width: Columns of a row that asks.
        key_width: Columns of a row that is seen.
        ends: Rows of the block, and where the tokens that they see end, for each sequence that is shorter than `key_width`.
    """

    sequences: slice
    heads: slice
    query_width: int
    key_width: int
    ends: list[tuple[slice, int]]

    @property
    def rows(self) -> int:
        """Sequences times heads."""
        return (self.sequences.stop - self.sequences.start) * (self.heads.stop - self.heads.start)

    def part(self, mask: torch.Tensor) -> torch.Tensor:
        """What the block sees of a mask `(sequences or 1, heads or 1, queries or 1, keys)`."""
        if mask.shape[0] != 1:
            mask = mask[self.sequences]
        if mask.shape[1] != 1:
            mask = mask[:, self.heads]
        return mask[:, :, : self.query_width, : self.key_width]


class Grid:
    """Where the tokens of packed rows lie in the grid, and its blocks.

    Attributes:
        blocks: All of them, in order.
        num_scores: Of the whole grid, all heads counted.
    """

    def __init__(self, packing: Packing, heads: int, in_blocks: bool):
        """Args:
        packing: Of the two rows.
        heads: Number of heads.
        in_blocks: Whether to cut it into blocks that a CPU's cache holds, each with its own width. It is one block otherwise, and
            no length is asked for.
        """
        self.blocks = list(_make_blocks(packing, heads)) if in_blocks else [_whole(packing, heads)]
        self.num_scores = sum(block.rows * block.query_width * block.key_width for block in self.blocks)
        self._query_sizes = [block.rows * block.query_width for block in self.blocks]
        self._key_sizes = [block.rows * block.key_width for block in self.blocks]
        # Those that share sequences share a width.
        widths = {(block.sequences.start, block.sequences.stop): block for block in self.blocks}
        sequences = [slice(*place) for place in widths]
        self.queries = GridSide(packing.queries, heads, sequences, [block.query_width for block in widths.values()])
        self.keys = self.queries
        if packing.keys is not packing.queries:
            self.keys = GridSide(packing.keys, heads, sequences, [block.key_width for block in widths.values()])

    def parts(
        self, asking: Sequence[torch.Tensor], seen: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Block, list[torch.Tensor]]]:
        """Cuts cells into those of each block.

        Args:
            asking: Of the queries' grid, `(cells, head_dim)` each.
            seen: Of the keys' grid, likewise.

        Yields:
            A block, and what it has of each, `(rows, width, head_dim)`.
        """
        cut = [cells.split(self._query_sizes) for cells in asking] + [cells.split(self._key_sizes) for cells in seen]
        for block, *parts in zip(self.blocks, *cut, strict=True):
            widths = [block.query_width] * len(asking) + [block.key_width] * len(seen)
            yield block, [part.view(block.rows, width, -1) for part, width in zip(parts, widths, strict=True)]


def grid_of(packing: Packing, heads: int, in_blocks: bool) -> Grid:
    """The grid of a packing, made once for all layers."""
    place = (heads, in_blocks)
    if place not in packing.grids:
        packing.grids[place] = Grid(packing, heads, in_blocks)
    return packing.grids[place]


class GridSide:
    """The cells of one side of a grid: those of a block after those of another, `(sequences, heads, width)` in each.

    Attributes:
        heads: Number of heads.
        to_grid: For each cell its row among `(tokens, heads)`, both flattened; empty cells repeat the last token of their
            sequence.
        from_grid: For each of the `(tokens, heads)` its cell.
    """

    def __init__(self, segments: Segments, heads: int, sequences: list[slice], widths: list[int]):
        """Args:
        segments: Of the row.
        heads: Number of heads.
        sequences: Those that have one width, in order.
        widths: Theirs.
        """
        self.heads = heads
        device = segments.lengths.device
        head = torch.arange(heads, device=device)
        first, columns = torch.empty_like(segments.lengths), torch.empty_like(segments.lengths)
        cells, start = [], 0
        for place, width in zip(sequences, widths, strict=True):
            lengths = segments.lengths[place, None]
            tokens = segments.starts[place, None] + torch.minimum(torch.arange(width, device=device), lengths - 1)
            # (sequences, 1, width) * heads + (heads, 1) -> (sequences * heads * width)
            cells.append((tokens[:, None, :] * heads + head[:, None]).flatten())
            first[place] = start + torch.arange(len(lengths), device=device) * (heads * width)
            columns[place] = width
            start += len(lengths) * heads * width
        self.to_grid = torch.cat(cells)
        # (tokens, 1) and (tokens, heads) -> (tokens * heads)
        places = (first[segments.ids] + segments.positions[0])[:, None] + columns[segments.ids, None] * head
        self.from_grid = places.flatten()
        self._places_by_count = {1: (self.to_grid, self.from_grid)}

    def enter(self, rows: torch.Tensor, count: int = 1, repeats: bool = True) -> list[torch.Tensor]:
        """Brings states into the grid.

        Args:
            rows: Of each token several states, such as key and value, side by side, `(tokens, count * heads * head_dim)`.
            count: How many.
            repeats: Whether an empty cell repeats the last token of its sequence, rather than being 0.

        Returns:
            The cells of each, `(cells, head_dim)`, one after another in memory.
        """
        to_grid, from_grid = self._places(count)
        rows = rows.reshape(-1, rows.shape[-1] // (count * self.heads))
        if repeats:
            cells = rows.index_select(0, to_grid)
        else:
            cells = rows.new_zeros(len(to_grid), rows.shape[-1]).index_copy_(0, from_grid, rows)
        return list(cells.chunk(count))

    def leave(self, cells: torch.Tensor, count: int = 1) -> torch.Tensor:
        """What `enter` did, undone: cells of one after another, `(count * cells, head_dim)`, to rows of all side by side."""
        rows = cells.index_select(0, self._places(count)[1])
        return rows.view(-1, count * self.heads * cells.shape[-1])

    def _places(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`to_grid` and `from_grid` for tokens that have several states side by side."""
        if count not in self._places_by_count:
            number = torch.arange(count, device=self.to_grid.device)[:, None]
            token, head = self.to_grid // self.heads, self.to_grid % self.heads
            # (count, cells), and (tokens, count, heads)
            to_grid = (token * count + number) * self.heads + head
            from_grid = self.from_grid.view(-1, 1, self.heads) + number * len(self.to_grid)
            self._places_by_count[count] = to_grid.flatten(), from_grid.flatten()
        return self._places_by_count[count]


def _whole(packing: Packing, heads: int) -> Block:
    widths = packing.queries.width, packing.keys.width
    return Block(slice(0, len(packing.queries)), slice(0, heads), *widths, ends=[])


def _make_blocks(packing: Packing, heads: int) -> Iterator[Block]:
    """Cuts the sequences, in their order, into blocks of at most `BLOCK_ENTRIES` scores; of a long sequence, its heads."""
    sides = packing.queries.lengths.tolist(), packing.keys.lengths.tolist()
    start = 0
    while start < len(packing.queries):
        stop, widths = start, (0, 0)
        while stop < len(packing.queries):
            wider = tuple(max(width, grid_width(side[stop])) for width, side in zip(widths, sides, strict=True))
            if stop > start and (stop + 1 - start) * heads * wider[0] * wider[1] > BLOCK_ENTRIES:
                break
            stop, widths = stop + 1, wider
        query_width, key_width = widths
        step = heads
        while step > 1 and (stop - start) * step * query_width * key_width > BLOCK_ENTRIES:
            step = max(part for part in range(1, step) if heads % part == 0)
        for head in range(0, heads, step):
            ends = [
                (slice(number * step, (number + 1) * step), length)
                for number, length in enumerate(sides[1][start:stop])
                if length < key_width
            ]
            yield Block(slice(start, stop), slice(head, head + step), query_width, key_width, ends)
        start = stop
