"""Losses of a draft's tokens: against naive full distributions in float64, and in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacer.training.losses import IGNORE, bucket_kl, chunked, token_losses

N, HEAD, VOCAB, K = 7, 11, 19, 4


def stored(teacher: Tensor, head_ids: Tensor, k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept of full log-probabilities ``(N, VOCAB)``, in the head's numbering."""
    head_of = torch.full((teacher.shape[1],), IGNORE)
    head_of[head_ids] = torch.arange(len(head_ids))
    top = teacher.topk(k)
    left_out = teacher.scatter(1, top.indices, -torch.inf).logsumexp(-1)
    return head_of[top.indices], top.values, left_out


def case(seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits over the head, teacher log-probabilities over the vocabulary, the head's ids."""
    generator = torch.Generator().manual_seed(seed)
    teacher = scale * torch.randn(N, VOCAB, generator=generator, dtype=torch.float64)
    logits = scale * torch.randn(N, HEAD, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), teacher.log_softmax(-1), torch.randperm(VOCAB, generator=generator)[:HEAD].sort()[0]


def naive(logits: Tensor, teacher: Tensor, head_ids: Tensor, k: int = K) -> Tensor:
    """Token by token: probabilities of both over the vocabulary, summed into buckets."""
    found = []
    for q_logits, p_log in zip(logits, teacher, strict=True):
        p, q = p_log.exp(), torch.zeros(VOCAB, dtype=torch.float64).scatter(0, head_ids, q_logits.softmax(-1))
        alone = [i for i in p.topk(k).indices.tolist() if i in head_ids.tolist()]
        rest = [i for i in range(VOCAB) if i not in alone]
        pairs = [(p[i], q[i]) for i in alone] + [(p[rest].sum(), q[rest].sum())]
        found.append(sum((a * (a.log() - b.log()) for a, b in pairs), torch.zeros(())))
    return torch.stack(found)


@pytest.mark.parametrize("seed", range(4))
def test_divergence_and_its_gradient_are_those_of_the_buckets(seed: int) -> None:
    """The bucket takes what is outside the head and what is outside the top k, and nothing else."""
    logits, teacher, head_ids = case(seed)
    rows, *_ = found = stored(teacher, head_ids)
    assert (rows == IGNORE).any() and (rows != IGNORE).any()
    got, want = bucket_kl(logits, *found), naive(logits, teacher, head_ids)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    (one,) = torch.autograd.grad((got * weights).sum(), logits, retain_graph=True)
    (other,) = torch.autograd.grad((want * weights).sum(), logits)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: bucket_kl(x, *found), logits)


def test_with_all_but_one_id_stored_it_is_the_whole_divergence() -> None:
    logits, _, _ = case(1)
    teacher = case(5)[0].detach().log_softmax(-1)
    found = stored(teacher, torch.arange(HEAD), HEAD - 1)
    want = F.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="none").sum(1)
    torch.testing.assert_close(bucket_kl(logits, *found), want)


def test_an_equal_draft_is_at_no_distance() -> None:
    """Also after what rounding to 11 bits does; and every other draft is farther."""
    for seed in range(3):
        logits = case(seed, scale=4.0)[0].detach().float().requires_grad_()
        rows, logprobs, rest = stored(logits.detach().log_softmax(-1), torch.arange(HEAD))
        found = rows, logprobs.half().float(), rest.half().float()
        distance = bucket_kl(logits, *found)
        (slope,) = torch.autograd.grad(distance.sum(), logits)
        assert float(distance.detach().abs().max()) < 1e-5 and float(slope.abs().max()) < 2e-3
        assert (bucket_kl(logits.flip(0), *found)[torch.arange(N) != N // 2] > 0.01).all()


def test_a_choice_outside_the_head_is_learnt_as_not_known() -> None:
    """Descent ends where the known ids have the teacher's own probabilities, and the rest is spread over the others."""
    teacher = torch.tensor([[0.7, 0.2, 0.06, 0.02, 0.01, 0.01]]).log()
    found = stored(teacher, torch.tensor([1, 2, 4, 5]), 3)  # the head lacks the first choice
    assert found[0].tolist() == [[IGNORE, 0, 1]]
    logits = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(3000):
        optimizer.zero_grad()
        bucket_kl(logits, *found).sum().backward()
        optimizer.step()
    torch.testing.assert_close(logits.detach().softmax(-1)[0], torch.tensor([0.2, 0.06, 0.37, 0.37]), atol=1e-3, rtol=0)


def test_no_id_in_the_head_and_a_sure_draft() -> None:
    """All in the bucket: nothing to learn. A draft sure to the last bit: finite, with a gradient that leads back."""
    rows = torch.full((1, 2), IGNORE)
    halves = torch.tensor([[0.6, 0.3]]).log(), torch.tensor([0.1]).log()
    logits = torch.randn(1, 5, requires_grad=True)
    distance = bucket_kl(logits, rows, *halves)
    (slope,) = torch.autograd.grad(distance.sum(), logits)
    assert float(distance.detach().abs()) < 1e-6 and float(slope.abs().max()) < 1e-6
    sure = torch.tensor([[60.0, 0.0, 0.0, 0.0, 0.0]], requires_grad=True)  # 1 − q is 0 in float32
    distance = bucket_kl(sure, torch.tensor([[0, 1]]), *halves)
    (slope,) = torch.autograd.grad(distance.sum(), sure)
    assert 20 < float(distance.detach()) < 30 and slope.isfinite().all()
    assert float(slope[0, 0]) == pytest.approx(0.4) and float(slope[0, 2:].sum()) == pytest.approx(-0.1)


def test_a_candidate_row_that_is_closed_changes_nothing() -> None:
    """Drafts that copy have one more row, −∞ where the head has the candidate."""
    logits, teacher, head_ids = case(2)
    found = stored(teacher, head_ids)
    wider = F.pad(logits, (0, 1), value=-torch.inf)
    torch.testing.assert_close(bucket_kl(wider, *found), bucket_kl(logits, *found))
    (slope,) = torch.autograd.grad(bucket_kl(wider, *found).sum(), logits)
    assert slope.isfinite().all()


def test_hard_and_soft_share_the_loss() -> None:
    logits, teacher, head_ids = case()
    found = stored(teacher, head_ids)
    labels = torch.tensor([0, 3, IGNORE, 10, 5, IGNORE, 1])
    hard = torch.where(labels == IGNORE, 0.0, F.cross_entropy(logits, labels.clamp_min(0), reduction="none"))
    soft = bucket_kl(logits, *found)
    for weight in (0.0, 0.3, 1.0):
        torch.testing.assert_close(token_losses(logits, labels, found, weight), (1 - weight) * hard + weight * soft)
    torch.testing.assert_close(token_losses(logits, labels, None, 0.3), hard)


@pytest.mark.parametrize("rows", [1, 3, 7, 50])
def test_chunks_change_neither_the_loss_nor_a_gradient(rows: int) -> None:
    """T93; and no call sees more rows than allowed, neither forward nor when it is computed again."""
    torch.manual_seed(0)
    head, states, (_, teacher, head_ids) = nn.Linear(6, HEAD).double(), torch.randn(N, 6, dtype=torch.float64), case()
    states.requires_grad_()
    found, labels, seen = stored(teacher, head_ids), torch.arange(N), []

    def losses(states: Tensor, labels: Tensor, *found: Tensor) -> Tensor:
        seen.append(len(states))
        return token_losses(head(states), labels, found, 0.5)

    wanted = torch.autograd.grad(losses(states, labels, *found).square().sum(), [states, *head.parameters()])
    seen.clear()
    total = chunked(losses, rows, states, labels, *found)
    assert total.shape == (N,) and sum(seen) == N
    got = torch.autograd.grad(total.square().sum(), [states, *head.parameters()])
    assert max(seen) <= rows and sum(seen) == (N if rows >= N else 2 * N)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
