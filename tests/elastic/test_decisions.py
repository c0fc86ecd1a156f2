"""Who is in the next view, and which work counts: the rules alone, in any order of events."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from laconic.membership.decisions import Action, Decisions, Give, Over, Publish, Refuse, units_done
from laconic.membership.view import Ask, Broken, News, Ready, Seat, View, to_text, view_of


def _view(actions: list[Action]) -> View:
    (found,) = [action.view for action in actions if isinstance(action, Publish)]
    return found


def _started(count: int = 3, *, min_ranks: int = 1, max_ranks: int = 8) -> tuple[Decisions, View]:
    rules = Decisions(first=count, min_ranks=min_ranks, max_ranks=max_ranks)
    actions: list[Action] = []
    for number in range(count):
        assert actions == []
        actions = rules.ready(Ready(worker=f"w{number}", turn=0))
    return rules, _view(actions)


def _ready(number: int, of: int = 2) -> Ready:
    """Worker number `number`, where every `of` workers hold one copy of the model."""
    replica, position = divmod(number, of)
    return Ready(worker=f"w{number}", turn=0, replica=f"w{replica * of}", position=position, ranks_per_replica=of)


def _pairs(count: int = 2, *, min_ranks: int = 1, max_ranks: int = 8) -> tuple[Decisions, View]:
    """So many replicas of two workers each, which arrive in another order."""
    rules = Decisions(first=count, min_ranks=min_ranks, max_ranks=max_ranks, ranks_per_replica=2)
    actions: list[Action] = []
    for number in [*range(1, 2 * count, 2), *range(0, 2 * count, 2)]:
        assert actions == []
        actions = rules.ready(_ready(number))
    return rules, _view(actions)


def _ask(worker: str, view: View, unit: int = 0, **said: bool) -> Ask:
    return Ask(worker=worker, view=view.number, unit=unit, why="a socket broke", **said)


def test_the_first_view_waits_for_all_and_has_no_state() -> None:
    _, view = _started(3)
    assert view.members == view.fresh == ("w0", "w1", "w2")
    assert (view.number, view.units, view.with_state_of("w2")) == (0, 0, ("w0", "w1", "w2"))


def test_a_death_is_announced_once_and_the_survivors_make_the_next_view() -> None:
    rules, view = _started(3)
    assert rules.gone("w1", "was killed") == [News(view=0, kind="down", why="worker w1 was killed")]
    assert rules.asked(_ask("w0", view, 5)) == []
    following = _view(rules.asked(_ask("w2", view, 5)))
    assert (following.members, following.fresh, following.lost) == (("w0", "w2"), (), ("w1",))
    assert (following.units, following.boundary) == (5, False)


def test_a_broken_socket_ends_the_view_for_all_before_the_death_is_known() -> None:
    rules, view = _started(3)
    (news,) = rules.asked(_ask("w0", view))
    assert isinstance(news, News)
    assert news.kind == "down"
    assert rules.asked(_ask("w2", view)) == []  # w1 may be alive: nothing is decided without it
    assert _view(rules.gone("w1", "was killed")).members == ("w0", "w2")


def test_a_unit_counts_exactly_if_every_survivor_has_prepared_it() -> None:
    view = View(number=0, members=("a", "b"))
    asks = [_ask("a", view, 7, prepared=True), _ask("b", view, 7, prepared=True)]
    assert units_done(asks) == 8
    assert units_done([asks[0], _ask("b", view, 7)]) == 7
    assert units_done([_ask("a", view, 8), asks[1]]) == 8  # a has completed it, so b has prepared it
    with pytest.raises(AssertionError, match="has not prepared"):
        units_done([_ask("a", view, 8), _ask("b", view, 7)])


def test_flags_of_a_unit_come_from_a_rank_that_heard_all_of_them_or_from_all_survivors() -> None:
    prepared = Ask(worker="w1", view=0, unit=5, prepared=True, flags="9", own_flags="4")
    for ahead, flags in ((True, "b"), (False, "6")):
        rules, view = _started(3)
        rules.gone("w2", "was killed")
        first = Ask(worker="w0", view=view.number, unit=6 if ahead else 5, prepared=not ahead, flags="b", own_flags="2")
        rules.asked(first)
        found = _view(rules.asked(replace(prepared, view=view.number)))
        assert (found.units, found.ahead, found.flags) == (6, ahead, flags)


def test_whoever_joins_waits_until_all_are_between_two_units() -> None:
    rules, view = _started(2)
    assert rules.ready(Ready(worker="w2", turn=0)) == [News(view=0, kind="change", why="others want to join")]
    # A death comes first, in the middle of a unit: nobody joins there.
    rules.gone("w1", "was killed")
    following = _view(rules.asked(_ask("w0", view, 3)))
    assert following.members == ("w0",)
    grown = _view(rules.asked(_ask("w0", following, 4, boundary=True)))
    assert (grown.members, grown.fresh, grown.boundary) == (("w0", "w2"), ("w2",), True)
    assert grown.with_state_of("w0") == ("w0", "w2")
    assert following.with_state_of("w0") == ()


def test_a_joiner_whose_source_dies_joins_later() -> None:
    rules, view = _started(2)
    rules.ready(Ready(worker="w2", turn=0))
    grown = _view([a for w in ("w0", "w1") for a in rules.asked(_ask(w, view, 1, boundary=True))])
    assert grown.fresh == ("w2",)
    rules.gone("w0", "was killed")
    rules.asked(Ask(worker="w2", view=1, fresh=True, turn=1))
    actions = rules.asked(_ask("w1", grown, 1))
    assert _view(actions).members == ("w1",)
    assert [a.kind for a in actions if isinstance(a, News)] == ["change"]


def test_with_every_holder_of_the_state_the_job_ends() -> None:
    rules, view = _started(1)
    rules.ready(Ready(worker="w1", turn=0))
    grown = _view(rules.asked(_ask("w0", view, 1, boundary=True)))
    assert grown.members == ("w0", "w1")
    rules.gone("w0", "was killed")
    (given,) = [a for a in rules.asked(Ask(worker="w1", view=1, fresh=True, turn=1)) if isinstance(a, Give)]
    assert "state of training is gone" in given.why


def test_too_few_ranks_end_the_job_unless_training_is_over() -> None:
    rules, view = _started(3, min_ranks=2)
    rules.gone("w1", "was killed")
    rules.gone("w2", "was killed")
    (given,) = rules.asked(_ask("w0", view))
    assert isinstance(given, Give)
    assert "1 of at least 2 ranks" in given.why
    rules, view = _started(2, min_ranks=2)
    rules.left("w1", finished=True)
    assert _view(rules.asked(_ask("w0", view, 9, prepared=True))).units == 10
    assert rules.left("w0", finished=True)[-1] == Over()


def test_ranks_that_leave_are_named_between_units_only() -> None:
    rules, view = _started(2)
    rules.asked(_ask("w0", view, 4, boundary=True, leaving=True))
    following = _view(rules.asked(_ask("w1", view, 4, boundary=True)))
    assert (following.members, following.leaving) == (("w0", "w1"), ("w0",))
    assert rules.left("w0", finished=False) == []
    assert _view(rules.asked(_ask("w1", following, 5, boundary=True))).members == ("w1",)


def test_a_member_that_was_taken_for_dead_gets_no_answer() -> None:
    rules, view = _started(2)
    rules.gone("w1", "is on a host that said nothing")
    assert _view(rules.asked(_ask("w0", view))).members == ("w0",)
    assert rules.asked(_ask("w1", view)) == []


def test_views_that_never_get_anywhere_end_the_job() -> None:
    rules, view = _started(2)
    for _ in range(20):
        actions = [a for name in view.members for a in rules.asked(_ask(name, view))]
        if any(isinstance(a, Give) for a in actions):
            break
        view = _view(actions)
    assert isinstance(actions[-1], Give)
    assert "a socket broke" in actions[-1].why


def test_the_first_view_waits_for_whole_replicas_and_keeps_their_ranks_together() -> None:
    _, view = _pairs(2)
    assert view.members == ("w0", "w1", "w2", "w3")
    assert view.seats == (Seat("w0", 0), Seat("w0", 1), Seat("w2", 0), Seat("w2", 1))
    assert view.replicas == ("w0", "w2")
    assert view.with_shards_of("w3") == ("w1", "w3")
    assert view.replicas_of(("w3", "w2")) == ("w2",)
    assert view_of(to_text(view)) == view


def test_with_one_rank_its_whole_replica_is_gone() -> None:
    rules, view = _pairs(3)
    assert rules.gone("w3", "was killed") == [News(view=0, kind="down", why="worker w3 was killed")]
    for message in (rules.asked(_ask("w2", view)), rules.raised("w2", "an error"), rules.gone("w2", "was killed")):
        assert message == []  # nobody listens to it any more
    assert rules.ready(_ready(2)) == []
    following = _view([a for name in ("w0", "w1", "w4", "w5") for a in rules.asked(_ask(name, view, 3))])
    assert following.members == ("w0", "w1", "w4", "w5")
    assert following.lost == ("w2", "w3")
    assert following.why == "worker w3 was killed"


def test_a_replica_joins_once_all_its_ranks_are_ready() -> None:
    rules, view = _pairs(1)
    assert rules.ready(_ready(3)) == []
    assert [a.kind for a in rules.ready(_ready(2)) if isinstance(a, News)] == ["change"]
    grown = _view([a for name in ("w0", "w1") for a in rules.asked(_ask(name, view, 1, boundary=True))])
    assert (grown.members, grown.fresh) == (("w0", "w1", "w2", "w3"), ("w2", "w3"))
    assert [grown.with_state_of(name) for name in ("w2", "w1")] == [("w0", "w2"), ("w1", "w3")]


def test_limits_count_replicas() -> None:
    rules, view = _pairs(2, min_ranks=2, max_ranks=2)
    for number in (4, 5):
        assert rules.ready(_ready(number)) == []  # there is no room
    rules.gone("w0", "was killed")
    actions = [a for name in ("w2", "w3") for a in rules.asked(_ask(name, view, 1))]
    (given,) = [a for a in actions if isinstance(a, Give)]
    assert "1 of at least 2 replicas" in given.why


def test_with_one_rank_its_whole_replica_leaves() -> None:
    rules, view = _pairs(2)
    asks = [_ask(f"w{n}", view, 4, boundary=True, leaving=n == 1) for n in range(4)]
    following = _view([a for ask in asks for a in rules.asked(ask)])
    assert following.leaving == ("w0", "w1")
    assert rules.left("w0", finished=False) == []
    assert rules.gone("w0", "ended with exit code 0") == []  # it has left, so the other one of its replica goes on
    for name in ("w2", "w3"):
        assert rules.asked(_ask(name, following, 5, boundary=True)) == []
    assert _view(rules.left("w1", finished=False)).members == ("w2", "w3")


def test_a_worker_of_another_kind_of_job_is_refused() -> None:
    rules, view = _pairs(2)
    (refused,) = rules.ready(Ready(worker="x", turn=0))
    assert isinstance(refused, Refuse)
    assert "--ranks-per-replica 2" in refused.why
    assert rules.gone("x", "ended with exit code 1") == []
    assert rules.view == view


def test_a_member_that_cannot_go_on_ends_the_view_before_it_asks() -> None:
    rules, view = _pairs(2)
    said = Broken(worker="w3", view=view.number, why="a socket broke")
    assert rules.broken(said) == [News(view=0, kind="down", why="a socket broke")]
    assert rules.broken(said) == []
    asks = [_ask(f"w{n}", view, 2, prepared=n != 3) for n in range(4)]
    following = _view([a for ask in asks for a in rules.asked(ask)])
    assert following.members == view.members
    assert rules.broken(said) == []  # of a view that is over already


@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_that_waits_inside_its_last_unit_has_not_begun_the_next(inside: bool) -> None:
    rules, view = _pairs(2)
    asks = [
        _ask("w0", view, 7, inside=inside),
        *(_ask(name, view, 6, prepared=True) for name in ("w1", "w2", "w3")),
    ]
    following = _view([a for ask in asks for a in rules.asked(ask)])
    assert (following.units, following.ahead) == (7, not inside)


def test_an_error_ends_the_job_or_only_the_rank() -> None:
    rules, _ = _started(2)
    (given,) = rules.raised("w1", "ValueError: no")
    assert isinstance(given, Give)
    rules = Decisions(first=2, min_ranks=1, max_ranks=8, on_error="replace")
    view = _view([a for n in range(2) for a in rules.ready(Ready(worker=f"w{n}", turn=0))])
    assert rules.raised("w1", "ValueError: no") == [News(view=0, kind="down", why="worker w1 raised ValueError: no")]
    assert _view(rules.asked(_ask("w0", view))).members == ("w0",)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("per_replica", [1, 2])
def test_no_unit_is_completed_twice_whatever_dies_when(seed: int, per_replica: int) -> None:
    """Members prepare units and complete them when all have; deaths anywhere never make two results of one unit."""
    chance = random.Random(seed)
    rules, view = _started(4) if per_replica == 1 else _pairs(3)
    done = dict.fromkeys(view.members, 0)
    prepared = dict.fromkeys(view.members, False)
    made_in: dict[int, int] = {}  # the view in which each unit was completed by anybody
    alive, asked = set(view.members), set()
    for _ in range(300):
        name = chance.choice(sorted(alive))
        actions: list[Action] = []
        kind = chance.random()
        if kind < 0.02 and len(alive) > per_replica:
            alive -= {other for other in view.members if view.seat_of(other).replica == view.seat_of(name).replica}
            actions = rules.gone(name, "was killed")
        elif kind < 0.1 and name not in asked:
            asked.add(name)
            actions = rules.asked(_ask(name, view, done[name], prepared=prepared[name]))
        elif name not in asked:
            if not prepared[name]:
                prepared[name] = all(done[other] >= done[name] for other in view.members)
            elif all(done[other] > done[name] or prepared[other] for other in view.members):
                assert made_in.setdefault(done[name], view.number) == view.number
                done[name], prepared[name] = done[name] + 1, False
        if any(isinstance(a, Give) for a in actions):
            return  # too many views without a unit
        for action in actions:
            if isinstance(action, Publish):
                for member in action.view.members:
                    if action.view.units > done[member]:
                        assert prepared[member]
                        assert made_in.setdefault(done[member], view.number) == view.number
                        done[member] += 1
                    prepared[member] = False
                view, asked = action.view, set()
