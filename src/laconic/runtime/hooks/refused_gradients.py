"""Errors for gradients that cannot be exchanged, and a warning; each says what to do."""

from __future__ import annotations

import torch

from laconic.errors import CommunicationError, UnsupportedGradient


def refuse_changed(name: str, gradient: torch.Tensor, view: torch.Tensor) -> None:
    """Raise if the parameter is no longer what was attached; view: its place in a bucket."""
    if gradient.dtype != view.dtype or gradient.shape != view.shape or gradient.device != view.device:
        raise UnsupportedGradient(
            f'parameter "{name}" has become {tuple(gradient.shape)} {gradient.dtype} on {gradient.device} since it '
            f"was attached as {tuple(view.shape)} {view.dtype} on {view.device}. Detach before changing a model, "
            "then attach again."
        )


def refuse_special(name: str, gradient: torch.Tensor) -> None:
    """Raise if the gradient is sparse or differentiable."""
    if gradient.layout != torch.strided:
        raise UnsupportedGradient(
            f'parameter "{name}" has a sparse gradient ({gradient.layout}); only dense ones are exchanged. '
            "Build the layer with sparse=False."
        )
    if gradient.requires_grad:
        raise UnsupportedGradient(
            f'the gradient of parameter "{name}" is itself differentiable (create_graph=True); averaging would '
            "cut that graph. Use torch.autograd.grad for the inner derivative."
        )


def new_memory_format(name: str, schedule: str) -> UnsupportedGradient:
    """A schedule that defers cannot hand out a gradient in the new format."""
    return UnsupportedGradient(
        f'parameter "{name}" has changed its memory format since it was attached, and '
        f"{schedule} would hand out gradients in the old one. Detach before "
        "model.to(memory_format=...), then attach again."
    )


def second_gradient(name: str) -> CommunicationError:
    """A gradient that was already taken cannot be replaced."""
    return CommunicationError(
        f'parameter "{name}" got a second gradient after the first had been taken: the previous backward pass '
        "was interrupted, or the parameter is used in several re-entrant checkpoints. After an interrupted "
        "pass detach and attach again; otherwise pass use_reentrant=False to torch.utils.checkpoint."
    )


def added_to_result(name: str, step: int, strategy: object) -> CommunicationError:
    """A backward pass has begun while .grad holds a result that is no gradient."""
    return CommunicationError(
        f'a backward pass of step {step} would add to the gradient of "{name}", which holds the result of the last '
        f'exchange: with "{strategy}" that is a momentum, a velocity or a direction and no mean of gradients. Put all '
        "passes of a step but the last inside session.accumulate(), and call optimizer.zero_grad() between steps."
    )


def several_passes(passes: int, step: int, strategy: object) -> str:
    """A warning: a step has exchanged several times, and each exchange has changed a momentum."""
    return (
        f"{passes} backward passes have exchanged gradients before optimizer.step() of step {step}, and "
        f'"{strategy}" has added the gradients of each to its momentum: a step was left out after a pass, or the loop '
        "runs several passes in a step (e.g. sharpness-aware minimization, or one pass for each of several "
        "optimizers). For such loops use a strategy that exchanges gradients and keeps no momentum, e.g. "
        '"int4 + error_feedback".'
    )


def sent_in_part(step: int) -> CommunicationError:
    """The previous pass failed after some gradients had been sent."""
    return CommunicationError(
        f"the last backward pass of step {step} was interrupted after a part of its gradients had "
        "been sent, which cannot be taken back. Detach and attach again."
    )


def left_over(name: str, step: int) -> CommunicationError:
    """The previous pass failed, and the next one would add to its gradients."""
    return CommunicationError(
        f'the last backward pass of step {step} was interrupted, and the gradient of "{name}" '
        "still holds a part of it. Call optimizer.zero_grad() after skipping a batch."
    )


def unfinished_pass(step: int) -> CommunicationError:
    """The optimizer's step comes before the end of the backward pass."""
    return CommunicationError(
        f"the backward pass of step {step} has not exchanged all gradients: it was interrupted, or "
        "all parameters are inside re-entrant checkpoints and some got no gradient. Detach and attach again, "
        "or pass use_reentrant=False to torch.utils.checkpoint."
    )


def only_accumulated(step: int) -> CommunicationError:
    """The optimizer's step comes before any pass that exchanges."""
    return CommunicationError(
        f"step {step} would apply gradients that were only accumulated on this rank. Run the last "
        "backward pass of a step outside session.accumulate()."
    )


def never_exchanged(name: str, step: int) -> CommunicationError:
    """The gradient did not come from a backward pass."""
    return CommunicationError(
        f'step {step} would apply a gradient of parameter "{name}" that was never exchanged: '
        "no backward pass has run since the last step. Compute gradients with backward(), or clear "
        "them with optimizer.zero_grad()."
    )


def unused(names: list[str], step: int, rank: int) -> CommunicationError:
    """Parameters got no gradient, although find_unused_parameters=False promises that all do."""
    return CommunicationError(
        f"{len(names)} parameters got no gradient in step {step} on rank {rank} "
        f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}), and find_unused_parameters=False "
        "promises that all do. Attach with find_unused_parameters=True."
    )
