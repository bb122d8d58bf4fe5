# ruff: noqa: E501  (a shape with its coordinates reads best on one line)
"""Draw the figures of the documentation from the package's own layout code, each for light and for dark pages.

python scripts/make_figures.py docs/figures
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from peagle.layout import CodLayout, sample, visible

CELL = 24
WORDS = ["<user>", "2+3", "?", "<reply>", "2", "+", "3", "is", "5", ".", "<end>", "\\n"]
IS_REPLY = [False] * 4 + [True] * 7 + [False]
NUM_DEPTHS = 4


@dataclass(frozen=True)
class Theme:
    """Colours of one page background."""

    name: str
    ink: str
    soft: str
    rule: str
    faint: str
    depths: tuple[str, ...]
    """Fill of depth 0, 1, 2, 3."""
    on_fill: str


LIGHT = Theme(
    "light", "#1c1f23", "#5c6570", "#d5d9de", "#f1f3f5", ("#0b6bcb", "#c2410c", "#15803d", "#9333ea"), "#ffffff"
)
DARK = Theme(
    "dark", "#e7eaed", "#9aa5b1", "#3a4148", "#23282d", ("#63b3ff", "#ff9d5c", "#5ad17f", "#c99bff"), "#14171a"
)


class Drawing:
    """Shapes gathered into one SVG file."""

    def __init__(self, width: float, height: float, theme: Theme, title: str) -> None:
        self.width, self.height, self.theme, self.title = width, height, theme, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", dash: str = ""
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2.5" fill="{fill}" '
            f'stroke="{stroke}"{dashed}/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float = 12, fill: str = "", anchor: str = "middle", turn: int = 0,
        bold: bool = False,
    ) -> None:  # fmt: skip
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        weight = ' font-weight="650"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{fill or self.theme.ink}"{turned}{weight}>{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{self.theme.soft}" stroke-width="1.4" fill="none" '
            f'marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{self.theme.soft}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif"><title>{escape(self.title)}</title>'
            f"{tip}{''.join(self.parts)}</svg>\n"
        )


def example() -> tuple[CodLayout, torch.Tensor, torch.Tensor]:
    """The layout that the figures show: its slots, which pair slots are supervised, the document ids."""
    # Pair slot i predicts word i + 2 and counts where words i + 1 and i + 2 belong to the reply.
    is_supervised = torch.tensor([IS_REPLY[i + 1] and i + 2 < 12 and IS_REPLY[i + 2] for i in range(len(WORDS) - 1)])
    document_ids = torch.zeros(len(WORDS) - 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(3)
    return sample(is_supervised, document_ids, NUM_DEPTHS, 0.7, 0.2, [generator]), is_supervised, document_ids


def cod_layout(theme: Theme) -> Drawing:
    """Anchors against depths: which slots a step trains."""
    layout, is_supervised, _ = example()
    count = is_supervised.numel()
    kept = set(zip(layout.anchor_pos.tolist(), layout.depth.tolist()))
    left, top, step = 96, 60, 50
    draw = Drawing(left + count * step + 10, top + NUM_DEPTHS * 40 + 62, theme, "COD layout of one conversation")
    for i in range(count):
        x = left + i * step
        draw.text(x + step / 2 - 3, top - 28, WORDS[i + 1], 12, bold=IS_REPLY[i + 1])
        draw.text(x + step / 2 - 3, top - 10, f"slot {i}", 10.5, theme.soft)
        for depth in range(NUM_DEPTHS):
            y = top + depth * 40
            label = WORDS[i + depth + 2] if i + depth + 2 < len(WORDS) else ""
            is_kept = (i, depth) in kept or (depth == 0 and bool(is_supervised[i]))
            is_possible = all(i + d < count and bool(is_supervised[i + d]) for d in range(depth + 1))
            if is_kept:
                draw.box(x, y, step - 6, 32, theme.depths[depth])
                draw.text(x + step / 2 - 3, y + 21, label, 12, theme.on_fill)
            elif depth == 0:
                draw.box(x, y, step - 6, 32, theme.faint, theme.rule)
                draw.text(x + step / 2 - 3, y + 21, "context", 10, theme.soft)
            elif is_possible:
                draw.box(x, y, step - 6, 32, "none", theme.soft, "3 3")
    for depth in range(NUM_DEPTHS):
        draw.text(left - 12, top + depth * 40 + 21, f"depth {depth}", 12.5, theme.depths[depth], "end", bold=True)
    draw.text(left - 12, top - 28, "token", 11, theme.soft, "end")
    foot = top + NUM_DEPTHS * 40 + 20
    draw.text(left, foot, "Filled: trained; the word inside is what the slot must predict.", 12, theme.soft, "start")
    draw.text(
        left, foot + 20, "Dashed: eligible, dropped by COD sampling. Grey: context that is read, not trained.", 12,
        theme.soft, "start",
    )  # fmt: skip
    return draw


def visibility(theme: Theme) -> Drawing:
    """The attention pattern over all slots of the example."""
    layout, is_supervised, document_ids = example()
    count = is_supervised.numel()
    anchors = torch.cat([torch.arange(count), layout.anchor_pos])
    depths = torch.cat([torch.zeros(count, dtype=torch.int64), layout.depth])
    seen = visible(anchors, depths, anchors, depths, document_ids)
    total, cell, left, top = anchors.numel(), 15, 74, 74
    draw = Drawing(left + total * cell + 190, top + total * cell + 34, theme, "Who sees whom")
    for q in range(total):
        name = f"({int(anchors[q])}, {int(depths[q])})"
        colour = theme.depths[int(depths[q])]
        draw.text(left - 6, top + q * cell + 11, name, 9.5, colour, "end")
        draw.text(left + q * cell + 10.5, top - 6, name, 9.5, colour, "start", turn=-60)
        for k in range(total):
            fill = theme.depths[int(depths[k])] if bool(seen[q, k]) else theme.faint
            draw.box(left + k * cell + 0.75, top + q * cell + 0.75, cell - 1.5, cell - 1.5, fill)
    split = count * cell
    right = left + total * cell + 14
    for y, lines in (
        (top + split / 2 - 16, ("base pass:", "pair slots, plain", "causal attention")),
        (top + split + (total - count) * cell / 2 - 16, ("rollout pass:", "context up to the", "anchor, own chain")),
    ):
        for index, line in enumerate(lines):
            draw.text(
                right, y + 17 * index, line, 12.5, theme.ink if index == 0 else theme.soft, "start", bold=index == 0
            )
    draw.box(left, top, split, split, "none", theme.ink)
    draw.box(left, top + split, total * cell, (total - count) * cell, "none", theme.ink)
    draw.text(left, top + total * cell + 24, "Row: the slot that looks. Column: the slot it sees. (anchor, depth)", 12,
              theme.soft, "start")  # fmt: skip
    return draw


def two_passes(theme: Theme) -> Drawing:
    """The training step: one base pass, then blocks of rollout slots against its keys and values."""
    draw = Drawing(780, 352, theme, "The two-pass training step")
    draw.text(20, 28, "1. Base pass", 15, anchor="start", bold=True)
    draw.text(20, 48, "all n pair slots, as a plain causal language model", 12, theme.soft, "start")
    for i in range(11):
        draw.box(20 + i * 34, 62, 28, 26, theme.depths[0])
        draw.text(34 + i * 34, 79, str(i), 11, theme.on_fill)
    draw.arrow(204, 92, 204, 116)
    draw.box(20, 120, 368, 40, theme.faint, theme.rule)
    draw.text(204, 145, "keys and values of every layer, detached", 12.5)
    draw.text(430, 28, "2. Rollout passes", 15, anchor="start", bold=True)
    draw.text(430, 48, "a block of neighbouring anchors at a time", 12, theme.soft, "start")
    layout, _, _ = example()
    x, block_of = 430, {}
    for anchor, depth in zip(layout.anchor_pos.tolist(), layout.depth.tolist()):
        block = 0 if anchor <= 3 else 1
        x = block_of.get(block, 430)
        draw.box(x, 62 + block * 78, 40, 26, theme.depths[depth])
        draw.text(x + 20, 79 + block * 78, f"{anchor}, {depth}", 11, theme.on_fill)
        block_of[block] = x + 44
    for block in (0, 1):
        draw.text(430, 106 + block * 78, "forward, loss and backward at once: its activations are gone", 11.5, theme.soft,
                  "start")  # fmt: skip
        draw.arrow(424, 76 + block * 78, 392, 134)
    draw.text(20, 206, "3. One backward through the base pass", 15, anchor="start", bold=True)
    for index, line in enumerate(
        (
            "The blocks have left their gradients on the detached keys and values. One backward with the base pass's own",
            "loss and those gradients completes the step: exactly the gradient of the whole, with one block in memory.",
        )
    ):
        draw.text(20, 228 + 18 * index, line, 12.5, theme.soft, "start")
    draw.text(20, 288, "The vocabulary, never in full", 15, anchor="start", bold=True)
    for index, line in enumerate(
        (
            "States go through head and loss a chunk of rows at a time, and the verifier's distribution is computed once per",
            "label position, not once per slot: no [slots, vocabulary] tensor exists.",
        )
    ):
        draw.text(20, 310 + 18 * index, line, 12.5, theme.soft, "start")
    return draw


def drafting(theme: Theme) -> Drawing:
    """Inference: one pass drafts K tokens, one pass verifies them."""
    draw = Drawing(780, 330, theme, "One round of decoding")
    words = ["2", "+", "3"]
    draw.text(20, 30, "One drafter pass drafts K = 4 tokens", 15, anchor="start", bold=True)
    for i, word in enumerate(words):
        draw.box(20 + i * 66, 80, 58, 34, theme.depths[0])
        draw.text(49 + i * 66, 102, word, 13, theme.on_fill)
    draw.text(20, 68, "known tokens and states", 12, theme.soft, "start")
    for d in range(1, 4):
        draw.box(230 + (d - 1) * 66, 80, 58, 34, theme.depths[d])
        draw.text(259 + (d - 1) * 66, 102, "mask", 12, theme.on_fill)
    draw.text(230, 68, "mask slots: mask token, learned state", 12, theme.soft, "start")
    drafted = ["is", "5", ".", "So"]
    for d, word in enumerate(drafted):
        x = 181 + d * 66 if d else 181
        draw.arrow(x, 118, x, 142)
        draw.box(x - 29, 146, 58, 34, "none", theme.depths[d])
        draw.text(x, 168, word, 13, theme.depths[d], bold=True)
    draw.text(470, 100, "All at once: no token waits for the one before.", 12.5, theme.soft, "start")
    draw.text(470, 168, "the draft, depth 0 to 3", 12.5, theme.soft, "start")
    draw.text(20, 218, "One verifier pass checks them all", 15, anchor="start", bold=True)
    verdicts = [("is", True), ("5", True), (".", True), ("So", False)]
    for d, (word, good) in enumerate(verdicts):
        x = 181 + d * 66
        draw.box(x - 29, 236, 58, 34, theme.depths[d] if good else "none", theme.depths[d], "" if good else "3 3")
        draw.text(x, 258, word, 13, theme.on_fill if good else theme.soft)
    draw.box(181 + 4 * 66 - 29, 236, 74, 34, theme.depths[0])
    draw.text(181 + 4 * 66 + 8, 258, "<end>", 13, theme.on_fill)
    draw.text(20, 300, "Three drafts are what the verifier would have written, the fourth is not. It gives its own token instead:", 12.5,
              theme.soft, "start")  # fmt: skip
    draw.text(
        20, 318, "four tokens for one verifier pass, and the same text as without a drafter.", 12.5, theme.soft, "start"
    )
    return draw


FIGURES = {"cod-layout": cod_layout, "visibility": visibility, "two-passes": two_passes, "drafting": drafting}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        for theme in (LIGHT, DARK):
            (folder / f"{name}-{theme.name}.svg").write_text(figure(theme).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
