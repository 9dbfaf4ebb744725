"""CTC as tensors of fixed shapes alone: it can be captured in a CUDA graph, which torch's own, with its lengths on the host, cannot.

losses = scanned(scores, frames, targets, lengths)      # as `native`, and a test compares their gradients
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = -1e30  # a log-probability; its sums stay finite
CtcLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def native(scores: Tensor, frames: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """scores float32 [B, T, C] log-probabilities with the blank first, frames int64 [B] that count, targets int64 [B, S] padded
    with blanks, lengths int64 [B] -> float32 [B], 0 where the frames are too few for the target."""
    return F.ctc_loss(
        scores.transpose(0, 1), targets, frames.cpu(), lengths.cpu(), reduction="none", zero_infinity=True
    )


def scanned(scores: Tensor, frames: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """Like `native`. Forward and backward probabilities in one scan: backward is forward over frames and target turned round."""
    batch, time, _ = scores.shape
    places = 2 * targets.shape[1] + 1
    device = scores.device
    states = torch.zeros(batch, places, dtype=torch.long, device=device)
    states[:, 1::2] = targets
    emitted = scores.gather(2, states[:, None].expand(-1, time, -1))
    with torch.no_grad():
        last = 2 * lengths[:, None]
        place = torch.arange(places, device=device)
        turned_place = (last - place).clamp_min(0)
        turned_time = (frames[:, None] - 1 - torch.arange(time, device=device)).clamp_min(0)
        there = (place <= last)[:, None] & (torch.arange(time, device=device) < frames[:, None])[:, :, None]

        def turned(values: Tensor) -> Tensor:
            """[B, T, places] in reverse, each row from its own end."""
            values = values.gather(1, turned_time[:, :, None].expand_as(values))
            return values.gather(2, turned_place[:, None].expand_as(values))

        both = torch.cat((emitted, turned(emitted)))
        names = torch.cat((states, states.gather(1, turned_place)))
        reached = _scan(both, names)
        forward, backward = reached[:batch], turned(reached[batch:])
        ends = torch.cat((last, (last - 1).clamp_min(0)), 1)
        final = forward[torch.arange(batch, device=device), (frames - 1).clamp_min(0)].gather(1, ends)
        final[:, 1] = torch.where(lengths > 0, final[:, 1], NEVER)
        total = final.logsumexp(1)
        possible = total > NEVER / 2
        share = (forward + backward - emitted - total[:, None, None]).clamp_max(0).exp()
        share = torch.where(there & possible[:, None, None], share, 0.0)
    # Its gradient is that of the loss; its value is replaced by the loss.
    lever = -(share * emitted).sum((1, 2))
    return lever + (torch.where(possible, -total, 0.0) - lever).detach()


def _scan(emitted: Tensor, names: Tensor) -> Tensor:
    """emitted [B, T, places], names of the places [B, places] -> [B, T, places]: log-probability to be there, having emitted all."""
    batch, time, places = emitted.shape
    emitted = emitted.transpose(0, 1).contiguous()
    # Two places that are never reached stand before the first.
    reached = emitted.new_full((time, batch, places + 2), NEVER)
    leap = torch.full_like(emitted[0], NEVER)
    leap[:, 2:] = torch.where((names[:, 2:] != 0) & (names[:, 2:] != names[:, :-2]), 0.0, NEVER)
    reached[0, :, 2:4] = emitted[0, :, :2]
    step, jump = torch.empty_like(leap), torch.empty_like(leap)
    for now in range(1, time):
        before = reached[now - 1]
        torch.logaddexp(before[:, 2:], before[:, 1:-1], out=step)
        torch.add(before[:, :-2], leap, out=jump)
        torch.logaddexp(step, jump, out=step)
        torch.add(step, emitted[now], out=reached[now, :, 2:])
    return reached[:, :, 2:].transpose(0, 1)
