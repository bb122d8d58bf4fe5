import pytest
import torch

from peagle.engine.cache import KeyValues, Ruler


def seen(mask: torch.Tensor) -> torch.Tensor:
    return mask == 0


@pytest.mark.parametrize("starts", [[7], [7, 7, 7], [3, 9, 4]])
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_masks_equal_their_definition(starts: list[int], window: int | None, is_chunked: bool):
    ruler = Ruler(40, 6, torch.float32, torch.device("cpu"))
    span = ruler.span(0, starts, 4)
    mask = ruler.causal(span) if window is None else ruler.limited(span, window, is_chunked)
    assert span.positions.tolist() == [[start + j for j in range(4)] for start in starts]
    for row, start in enumerate(starts):
        for j in range(4):
            q = start + j
            for k in range(span.end):
                near = window is None or (k // window == q // window if is_chunked else k > q - window)
                assert seen(mask.expand(len(starts), 1, 4, span.end))[row, 0, j, k] == (k <= q and near)


def test_no_mask_is_made_where_none_is_needed():
    ruler = Ruler(40, 6, torch.float32, torch.device("cpu"))
    assert ruler.causal(ruler.span(0, [0], 20)) is None
    assert ruler.causal(ruler.span(0, [13, 13], 1)) is None
    assert ruler.limited(ruler.span(0, [0], 20), 5, False) is not None
    assert seen(ruler.square(ruler.span(0, [0], 3)))[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_keys_lie_at_their_positions_and_a_shorter_row_overwrites_what_was_rolled_back():
    cache, ruler = KeyValues(3, 10), Ruler(10, 4, torch.float32, torch.device("cpu"))

    def put(first_row: int, starts: list[int], value: float, count: int) -> torch.Tensor:
        span = ruler.span(first_row, starts, count)
        new = torch.full((len(starts), 2, count, 4), value)
        return cache.write(0, new, new, span)[0]

    put(0, [0], 1.0, 3)
    put(1, [0], 2.0, 2)
    keys = put(0, [3, 2], 5.0, 2)
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 1, 5, 5], [2, 2, 5, 5, 0]]
    keys = put(0, [3, 3], 6.0, 1)
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 1, 6], [2, 2, 5, 6]]
    cache.move(1, 2, 4)
    keys = put(2, [4], 7.0, 1)
    assert keys[:, 0, :, 0].tolist() == [[2, 2, 5, 6, 7]]
