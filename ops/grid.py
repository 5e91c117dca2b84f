"""The grid of packed attention: each sequence is a row, and blocks of rows are as wide as their longest row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from metaphrase.modeling.packing import Packing, Segments, grid_width

# Most scores of a block, so that they stay in the processor's cache.
BLOCK_ENTRIES = 2**19


@dataclass(frozen=True)
class Block:
    """Neighbouring sequences, or some heads of one sequence, that are computed together.

    Attributes:
        sequences: Indices of the sequences.
        heads: Indices of the heads.
        query_width: Columns of a row of queries.
        key_width: Columns of a row of keys.
        ends: Rows of the block, and the end of their keys, for each sequence that is shorter than `key_width`.
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
        """Return the part of a mask (sequences or 1, H or 1, queries or 1, keys) for the block."""
        if mask.shape[0] != 1:
            mask = mask[self.sequences]
        if mask.shape[1] != 1:
            mask = mask[:, self.heads]
        return mask[:, :, : self.query_width, : self.key_width]


class Grid:
    """The places of packed tokens in the grid, and its blocks.

    Attributes:
        blocks: The blocks, in order.
        num_scores: Scores of the grid, in all heads.
    """

    def __init__(self, packing: Packing, heads: int):
        self.blocks = list(_make_blocks(packing, heads))
        self.num_scores = sum(block.rows * block.query_width * block.key_width for block in self.blocks)
        self._query_sizes = [block.rows * block.query_width for block in self.blocks]
        self._key_sizes = [block.rows * block.key_width for block in self.blocks]
        # Blocks of the same sequences have the same width.
        widths = {(block.sequences.start, block.sequences.stop): block for block in self.blocks}
        sequences = [slice(*bounds) for bounds in widths]
        self.queries = GridSide(packing.queries, heads, sequences, [block.query_width for block in widths.values()])
        self.keys = self.queries
        if packing.keys is not packing.queries:
            self.keys = GridSide(packing.keys, heads, sequences, [block.key_width for block in widths.values()])

    def parts(
        self, query_cells: Sequence[torch.Tensor], key_cells: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Block, list[torch.Tensor]]]:
        """Split cells into blocks.

        Args:
            query_cells: Cells of the queries' grid, (cells, head_dim) each.
            key_cells: Cells of the keys' grid, (cells, head_dim) each.

        Yields:
            A block, and its cells of each tensor, (rows, width, head_dim).
        """
        cut = [cells.split(self._query_sizes) for cells in query_cells]
        cut += [cells.split(self._key_sizes) for cells in key_cells]
        for block, *parts in zip(self.blocks, *cut, strict=True):
            widths = [block.query_width] * len(query_cells) + [block.key_width] * len(key_cells)
            yield block, [part.view(block.rows, width, -1) for part, width in zip(parts, widths, strict=True)]


def grid_of(packing: Packing, heads: int) -> Grid:
    """Return the grid of a packing, made once for all layers."""
    if heads not in packing.grids:
        packing.grids[heads] = Grid(packing, heads)
    return packing.grids[heads]


class GridSide:
    """The cells of the queries or of the keys, block by block, each (sequences, H, width).

    Attributes:
        heads: Number of heads.
        to_grid: Index of each cell among the flattened (tokens, H). Empty cells repeat the last token of their sequence.
        from_grid: Cell of each of the flattened (tokens, H).
    """

    def __init__(self, segments: Segments, heads: int, sequences: list[slice], widths: list[int]):
        """Args:
        segments: Sequences of the row.
        heads: Number of heads.
        sequences: Groups of sequences with one width, in order.
        widths: Width of each group.
        """
        self.heads = heads
        device = segments.lengths.device
        head = torch.arange(heads, device=device)
        first, columns = torch.empty_like(segments.lengths), torch.empty_like(segments.lengths)
        cells, start = [], 0
        for group, width in zip(sequences, widths, strict=True):
            lengths = segments.lengths[group, None]
            tokens = segments.starts[group, None] + torch.minimum(torch.arange(width, device=device), lengths - 1)
            # (sequences, 1, width) * heads + (heads, 1) -> (sequences * heads * width)
            cells.append((tokens[:, None, :] * heads + head[:, None]).flatten())
            first[group] = start + torch.arange(len(lengths), device=device) * (heads * width)
            columns[group] = width
            start += len(lengths) * heads * width
        self.to_grid = torch.cat(cells)
        # (tokens, 1) and (tokens, heads) -> (tokens * heads)
        cell = (first[segments.ids] + segments.positions[0])[:, None] + columns[segments.ids, None] * head
        self.from_grid = cell.flatten()
        self._indices_by_count = {1: (self.to_grid, self.from_grid)}

    def enter(self, rows: torch.Tensor, count: int = 1, repeats: bool = True) -> list[torch.Tensor]:
        """Copy states into the grid.

        Args:
            rows: States of each token, such as key and value, side by side, (tokens, count * H * head_dim).
            count: Number of states per token.
            repeats: True fills an empty cell with the last token of its sequence, False with 0.

        Returns:
            The cells of each state, (cells, head_dim), one after another in memory.
        """
        to_grid, from_grid = self._indices(count)
        rows = rows.reshape(-1, rows.shape[-1] // (count * self.heads))
        if repeats:
            cells = rows.index_select(0, to_grid)
        else:
            cells = rows.new_zeros(len(to_grid), rows.shape[-1]).index_copy_(0, from_grid, rows)
        return list(cells.chunk(count))

    def leave(self, cells: torch.Tensor, count: int = 1) -> torch.Tensor:
        """Undo `enter`: (count * cells, head_dim) -> (tokens, count * H * head_dim)."""
        rows = cells.index_select(0, self._indices(count)[1])
        return rows.view(-1, count * self.heads * cells.shape[-1])

    def _indices(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `to_grid` and `from_grid` for tokens with several states side by side."""
        if count not in self._indices_by_count:
            number = torch.arange(count, device=self.to_grid.device)[:, None]
            token, head = self.to_grid // self.heads, self.to_grid % self.heads
            # (count, cells) and (tokens, count, H)
            to_grid = (token * count + number) * self.heads + head
            from_grid = self.from_grid.view(-1, 1, self.heads) + number * len(self.to_grid)
            self._indices_by_count[count] = to_grid.flatten(), from_grid.flatten()
        return self._indices_by_count[count]


def _make_blocks(packing: Packing, heads: int) -> Iterator[Block]:
    """Split the sequences, in order, into blocks of at most `BLOCK_ENTRIES` scores. A long sequence is split by heads."""
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
