"""Decisions in the situations that matter, one by one."""

from __future__ import annotations

from dataclasses import replace
from datetime import time, timedelta
from typing import Any

import pytest

from services.colocation.decision.actions import CreateJob, Evict, Fail, Phase, Plan, Reason, Release, Resize, Suspend
from services.colocation.decision.decide import decide
from services.colocation.decision.demands import Demands, Taint, Toleration
from services.colocation.decision.model import (
    Cluster,
    EvictionOrder,
    Guard,
    Node,
    Outcome,
    Pool,
    Stage,
    Tenant,
    Window,
)
from tests.colocation.clusters import (
    BROKEN,
    CALM,
    LIMITS,
    NEAR,
    START,
    apply,
    held,
    node,
    pool,
    preemptor,
    running,
    tenant,
)


def cluster(*tenants: Tenant, nodes: tuple[Node, ...] = (node(),), resizable: bool = False, **of_pool: Any) -> Cluster:
    return Cluster(START, nodes, (pool(**of_pool),), tenants, resizable)


def released(plan: Plan) -> dict[str, tuple[str, int]]:
    return {a.key.name: (a.node, a.cores) for a in plan.actions if isinstance(a, Release)}


def removed(plan: Plan) -> dict[str, Reason]:
    return {a.key.name: a.reason for a in plan.actions if isinstance(a, Suspend | Evict)}


def reason(plan: Plan, name: str) -> Reason | None:
    return next(report.reason for key, report in plan.tenants.items() if key.name == name)


def test_freed_cores_are_what_serving_its_reserve_and_all_other_pods_leave() -> None:
    seen = cluster(nodes=(node(cores=16, others=1500, serving=5000),), baseline_cores=4, reserved_cores=2)
    assert decide(seen).pools["p"].freed == {"n0": 7}  # 16 - max(4, 5) - 2 - 1.5, in whole cores
    assert decide(replace(seen, pools=(pool(baseline_cores=4, cpu_percent=25),))).pools["p"].freed == {"n0": 4}


def test_a_new_tenant_gets_its_job_and_is_released_with_what_is_free_up_to_its_maximum() -> None:
    plan = decide(cluster(tenant("a", 2, 6, has_job=False)))
    assert isinstance(plan.actions[0], CreateJob)
    assert released(plan) == {"a": ("n0", 6)}


def test_it_goes_where_it_fits_tightest_and_never_to_a_node_that_takes_no_pods() -> None:
    nodes = (node("big", 16), node("small", 4), node("cordoned", 3, schedulable=False))
    assert released(decide(cluster(tenant("a", 3), nodes=nodes))) == {"a": ("small", 3)}


def test_a_namespace_that_has_less_goes_first_at_equal_priority() -> None:
    them = (running("r", 2, namespace="a"), tenant("x", 2, namespace="a"), tenant("y", 2, namespace="b"))
    assert released(decide(cluster(*them, nodes=(node(cores=4),)))) == {"y": ("n0", 2)}


def test_priority_goes_first_until_waiting_has_made_up_for_it() -> None:
    patient = tenant("patient", 4, created=START - timedelta(minutes=11))
    assert released(decide(cluster(patient, tenant("urgent", 4, priority=12), nodes=(node(cores=4),)))) == {
        "urgent": ("n0", 4)
    }
    assert released(decide(cluster(patient, tenant("urgent", 4, priority=10), nodes=(node(cores=4),)))) == {
        "patient": ("n0", 4)
    }


def test_the_first_that_does_not_fit_has_a_node_kept_for_it() -> None:
    them = (running("r", 6, least=6), tenant("large", 8, priority=5), tenant("small", 2))
    plan = decide(cluster(*them, nodes=(node(cores=8),)))
    assert not released(plan)
    assert (reason(plan, "large"), reason(plan, "small")) == (Reason.NO_ROOM, Reason.BEHIND_RESERVATION)
    elsewhere = decide(cluster(*them, nodes=(node(cores=8), node("n1", 2))))
    assert released(elsewhere) == {"small": ("n1", 2)}


def test_what_no_node_can_ever_take_is_said_and_holds_nobody_up() -> None:
    plan = decide(cluster(tenant("giant", 99, priority=50), tenant("small", 2)))
    assert reason(plan, "giant") is Reason.TOO_LARGE
    assert "16" in next(r.message for k, r in plan.tenants.items() if k.name == "giant")
    assert released(plan) == {"small": ("n0", 2)}


def test_preemption_pushes_out_the_least_important_and_waits_for_their_end_without_pushing_out_more() -> None:
    seen = cluster(
        running("low", 4, least=4, priority=1),
        running("middle", 4, least=4, priority=5),
        preemptor("urgent", 4),
        nodes=(node(cores=8),),
    )
    plan = decide(seen)
    assert removed(plan) == {"low": Reason.PREEMPTED}
    assert not released(plan)
    still_ending = apply(seen, plan, stubborn=True)
    assert decide(still_ending).actions == ()
    assert released(decide(apply(still_ending, decide(still_ending)))) == {"urgent": ("n0", 4)}


def test_nobody_is_pushed_out_by_an_equal_or_by_one_that_may_not() -> None:
    low = running("low", 8, least=8, priority=5)
    assert not removed(decide(cluster(low, preemptor("equal", 4, priority=5), nodes=(node(cores=8),))))
    assert not removed(decide(cluster(low, tenant("meek", 4, priority=50), nodes=(node(cores=8),))))


def test_borrowed_cores_are_taken_back_for_a_newcomer_where_pods_can_be_resized() -> None:
    plan = decide(cluster(running("r", 8, least=2), tenant("new", 4), nodes=(node(cores=8),), resizable=True))
    assert [(a.key.name, a.cores, a.reason) for a in plan.actions if isinstance(a, Resize)] == [
        ("r", 4, Reason.SHRUNK_FOR_ROOM)
    ]
    assert released(plan) == {"new": ("n0", 4)}


def test_a_pod_whose_node_can_not_resize_it_keeps_its_cores_and_lends_none() -> None:
    fixed = running("r", 8, least=2, resizable=False)
    assert not released(decide(cluster(fixed, tenant("new", 4), nodes=(node(cores=8),), resizable=True)))
    growing = running("r", 2, least=2, resizable=False, max_cores=8)
    assert decide(cluster(growing, nodes=(node(cores=8),), resizable=True)).actions == ()


def test_where_they_cannot_nobody_is_given_more_than_its_minimum_while_others_wait() -> None:
    plan = decide(cluster(tenant("a", 2, 8), tenant("b", 7), nodes=(node(cores=8),)))
    assert released(plan) == {"a": ("n0", 2)}


def test_declared_memory_bandwidth_limits_a_node_as_cores_do() -> None:
    hungry = [tenant(f"t{i}", 1, 4, bandwidth_per_core=1000) for i in range(4)]
    plan = decide(cluster(*hungry, bandwidth=3000))
    assert sorted(cores for _, cores in released(plan).values()) == [1, 1, 1]


GPU = Taint("nvidia.com/gpu", "", "NoSchedule")


@pytest.mark.parametrize(
    ("demands", "where"),
    [
        (Demands(), "open"),
        (Demands(tolerations=(Toleration("nvidia.com/gpu", "Exists", "", ""),)), "gpu"),
        (Demands(tolerations=(Toleration("", "Exists", "", ""),)), "gpu"),
        (Demands(tolerations=(Toleration("nvidia.com/gpu", "", "other", ""),)), "open"),
        (Demands(tolerations=(Toleration("nvidia.com/gpu", "Exists", "", "NoExecute"),)), "open"),
        (Demands((("pool", "p"),), (Toleration("nvidia.com/gpu", "Equal", "", "NoSchedule"),)), "gpu"),
    ],
)
def test_it_goes_to_a_node_that_it_may_run_on_though_another_is_tighter(demands: Demands, where: str) -> None:
    nodes = (node("gpu", 4, taints=(GPU,)), node("open", 8))
    assert released(decide(cluster(tenant("a", 4, demands=demands), nodes=nodes))) == {"a": (where, 4)}


@pytest.mark.parametrize("may_preempt", [False, True])
def test_what_may_run_on_no_node_that_is_large_enough_says_so_and_holds_nobody_up(may_preempt: bool) -> None:
    nodes = (node("gpu", 8, taints=(GPU,)), node("open", 4))
    made = preemptor("lost", 8) if may_preempt else tenant("lost", 8)
    lost = replace(made, created=START - timedelta(hours=9))
    tolerant = tenant("b", 4, demands=Demands(tolerations=(Toleration("", "Exists", "", ""),)))
    plan = decide(cluster(running("r", 4, on="gpu"), running("s", 4, on="open"), lost, tolerant, nodes=nodes))
    assert released(plan) == {"b": ("gpu", 4)}
    assert removed(plan) == {}
    assert reason(plan, "lost") is Reason.NO_SUITABLE_NODE


@pytest.mark.parametrize("may_preempt", [False, True])
def test_what_no_nodes_memory_bandwidth_can_ever_carry_is_said_and_holds_nobody_up_and_pushes_nobody_out(
    may_preempt: bool,
) -> None:
    greedy = preemptor("greedy", 12) if may_preempt else tenant("greedy", 12)
    greedy = replace(greedy, bandwidth_per_core=100, created=START - timedelta(hours=9))
    plan = decide(cluster(running("r", 8), greedy, tenant("b", 8), bandwidth=1000))
    assert released(plan) == {"b": ("n0", 8)}
    assert removed(plan) == {}
    assert reason(plan, "greedy") is Reason.TOO_MUCH_BANDWIDTH
    assert "1200 MB/s of memory bandwidth for 12 cores" in plan.tenants[greedy.key].message


def test_a_broken_slo_first_shrinks_then_suspends_half_then_all_then_evicts_and_comes_back_in_steps() -> None:
    seen = cluster(
        running("a", 4, least=2, priority=1),
        running("b", 4, least=2, priority=2),
        nodes=(node(cores=8),),
        resizable=True,
        objectives=LIMITS,
        reading=BROKEN,
    )
    stages, cores = [], []
    for _ in range(5):
        plan = decide(seen)
        seen = apply(seen, plan, seconds=31)
        stages.append(plan.pools["p"].guard.stage)
        cores.append(held(seen)["n0"])
    assert stages == [Stage.SHRINK, Stage.SUSPEND_HALF, Stage.SUSPEND_ALL, Stage.EVICT, Stage.EVICT]
    assert cores == [4, 4, 0, 0, 0]
    seen = replace(seen, pools=tuple(replace(each, reading=CALM) for each in seen.pools))
    stages, cores = [], []
    for _ in range(9):
        plan = decide(seen)
        seen = apply(seen, plan, seconds=31)
        stages.append(plan.pools["p"].guard.stage)
        cores.append(held(seen)["n0"])
    assert stages == [
        *[Stage.EVICT] * 2,
        *[Stage.SUSPEND_ALL] * 2,
        *[Stage.SUSPEND_HALF] * 2,
        *[Stage.SHRINK] * 2,
        Stage.NORMAL,
    ]
    assert cores == [0, 0, 0, 0, 4, 4, 4, 4, 8]


def test_a_stage_is_given_a_whole_window_to_show_its_effect() -> None:
    seen = cluster(running("a", 4), objectives=LIMITS, reading=BROKEN)
    seen = apply(seen, decide(seen), seconds=29)
    plan = decide(seen)
    assert plan.pools["p"].guard.stage is Stage.SHRINK
    assert decide(apply(seen, plan, seconds=2)).pools["p"].guard.stage is Stage.SUSPEND_HALF


def test_a_figure_that_swings_around_its_limit_moves_the_guard_once() -> None:
    seen = cluster(running("a", 4), objectives=LIMITS)
    changes = []
    for swing in range(40):
        seen = replace(seen, pools=tuple(replace(p, reading=NEAR if swing % 2 else CALM) for p in seen.pools))
        if not swing:
            seen = replace(seen, pools=tuple(replace(p, reading=BROKEN) for p in seen.pools))
        plan = decide(seen)
        changes.append(plan.pools["p"].guard.stage)
        seen = apply(seen, plan)
    assert set(changes) == {Stage.SHRINK}


def test_at_the_last_stage_pods_that_take_their_time_are_killed() -> None:
    guard = Guard(Stage.EVICT, START)
    plan = decide(cluster(tenant("slow", lingering=True), objectives=LIMITS, reading=BROKEN, guard=guard))
    assert [type(a) for a in plan.actions] == [Evict]


def test_those_who_gave_way_to_serving_keep_their_place_and_the_preempted_lose_it() -> None:
    slow = cluster(running("a", 4, least=4), objectives=LIMITS, reading=BROKEN, guard=Guard(Stage.SUSPEND_ALL, START))
    assert decide(slow).tenants[slow.tenants[0].key].queued == START
    later = replace(
        cluster(running("a", 4, least=4), preemptor("u", 4), nodes=(node(cores=4),)), now=START + timedelta(minutes=3)
    )
    assert decide(later).tenants[later.tenants[0].key].queued == later.now


@pytest.mark.parametrize(
    ("order", "first"),
    [
        (EvictionOrder.LOWEST_PRIORITY_FIRST, "low"),
        (EvictionOrder.NEWEST_FIRST, "new"),
        (EvictionOrder.LARGEST_FIRST, "large"),
    ],
)
def test_the_pool_says_who_gives_way_first(order: EvictionOrder, first: str) -> None:
    them = (
        running("low", 2, least=2, priority=0, changed=START - timedelta(hours=2)),
        running("new", 2, least=2, priority=5, changed=START),
        running("large", 4, least=4, priority=9, changed=START - timedelta(hours=1)),
    )
    plan = decide(cluster(*them, nodes=(node(cores=7),), eviction_order=order))
    assert removed(plan) == {first: Reason.CORES_RECLAIMED}


def test_where_a_resize_was_refused_it_is_the_newcomer_who_waits_again() -> None:
    kept = running("kept", 8, least=2, priority=0, resizable=False)
    newcomer = running("newcomer", 4, least=4, priority=9, pod_pending=True)
    assert removed(decide(cluster(kept, newcomer, nodes=(node(cores=8),), resizable=True))) == {
        "newcomer": Reason.CORES_RECLAIMED
    }


def test_a_tenant_whose_pod_does_not_start_makes_room_and_is_tried_again_after_the_others() -> None:
    stuck = running("stuck", 4, least=4, priority=900, pod_pending=True, pending_since=START, pending_why="no memory")
    seen = replace(cluster(stuck, tenant("next", 4), nodes=(node(cores=4),)), now=START + timedelta(seconds=119))
    assert not removed(decide(seen))
    seen = replace(seen, now=START + timedelta(seconds=120))
    plan = decide(seen)
    assert removed(plan) == {"stuck": Reason.NOT_STARTED}
    assert plan.tenants[stuck.key].message == "its pod was given cores and did not start: no memory"
    seen = apply(seen, plan)
    if not released(plan):
        seen = apply(seen, decide(seen))
    assert held(seen) == {"n0": 4}
    assert reason(decide(seen), "stuck") is Reason.TRIED_LATER
    # The other one ends.
    seen = replace(seen, tenants=tuple(each for each in seen.tenants if each.key == stuck.key))
    assert not released(decide(replace(seen, now=START + timedelta(seconds=719))))
    assert released(decide(replace(seen, now=START + timedelta(seconds=720)))) == {"stuck": ("n0", 4)}


def test_outside_its_windows_a_pool_suspends_everybody() -> None:
    nights = (Window(frozenset({0, 1, 2, 3, 4}), time(22), time(6)),)
    seen = cluster(running("a", 4), tenant("b"), windows=nights)
    plan = decide(seen)
    assert removed(plan) == {"a": Reason.WINDOW_CLOSED}
    assert reason(plan, "b") is Reason.WINDOW_CLOSED
    assert not removed(decide(replace(seen, now=START + timedelta(hours=11))))
    assert not removed(decide(replace(seen, now=START + timedelta(days=4, hours=17))))  # Saturday, of Friday's night
    assert removed(decide(replace(seen, now=START + timedelta(days=5, hours=11))))  # Saturday's own night


def test_windows_follow_the_clocks_of_their_time_zone() -> None:
    noon = (Window(frozenset(range(7)), time(20), time(22)),)  # 12:00 UTC is 21:00 in Tokyo
    assert decide(cluster(windows=noon, time_zone="Asia/Tokyo")).pools["p"].open
    assert not decide(cluster(windows=noon)).pools["p"].open


def test_of_two_pools_that_select_a_node_the_older_has_it_and_the_other_is_told() -> None:
    newer = pool("newer", created=START)
    seen = Cluster(START, (node(),), (newer, pool()), (tenant("a"), tenant("b", pool="newer")))
    plan = decide(seen)
    assert plan.pools["newer"].conflicts == {"n0": "p"}
    assert plan.pools["p"].conflicts == {}
    assert released(plan) == {"a": ("n0", 1)}
    assert reason(plan, "b") is Reason.TOO_LARGE


def test_a_tenant_of_no_pool_waits_and_its_job_is_suspended() -> None:
    plan = decide(cluster(running("a", 2, pool="gone")))
    assert removed(plan) == {"a": Reason.NO_POOL}


def test_a_pool_that_is_deleted_lets_its_tenants_go() -> None:
    plan = decide(cluster(running("a", 2), tenant("b"), deleting=True))
    assert removed(plan) == {"a": Reason.POOL_DELETED}
    assert reason(plan, "b") is Reason.POOL_DELETED


def test_on_a_cordoned_node_tenants_run_on_but_one_whose_pod_was_drained_is_moved() -> None:
    cordoned = (node(schedulable=False), node("n1"))
    assert decide(cluster(running("a", 2), nodes=cordoned)).actions == ()
    seen = cluster(running("a", 2, least=2, pod_pending=True), nodes=cordoned)
    plan = decide(seen)
    assert removed(plan) == {"a": Reason.NODE_LOST}
    assert released(decide(apply(seen, plan))) == {"a": ("n1", 2)}


def test_a_tenant_past_its_deadline_fails_and_one_that_ended_is_left_alone() -> None:
    late = running("late", 2, deadline=START - timedelta(seconds=1))
    done = tenant("done", outcome=Outcome.SUCCEEDED, deadline=START - timedelta(seconds=1))
    plan = decide(cluster(late, done))
    assert [type(a) for a in plan.actions] == [Fail]
    assert plan.tenants[done.key].phase is Phase.SUCCEEDED


def test_a_cluster_of_nothing_gives_a_plan_of_nothing() -> None:
    assert decide(Cluster(START, (), (), ())).actions == ()


def test_pools_without_limits_never_leave_the_normal_stage() -> None:
    free: Pool = pool(guard=Guard(Stage.EVICT, START))
    assert decide(Cluster(START, (node(),), (free,), ())).pools["p"].guard == Guard()


def test_the_cores_of_one_that_ends_at_its_deadline_are_given_only_when_its_pod_has_ended() -> None:
    late = running("late", 4, deadline=START - timedelta(seconds=1))
    plan = decide(cluster(late, tenant("next", 4), nodes=(node(cores=4),)))
    assert [type(a) for a in plan.actions] == [Fail]
    assert reason(plan, "next") is Reason.NO_ROOM


def test_the_cores_of_one_that_changes_its_pool_are_given_only_when_its_pod_has_ended() -> None:
    mover = running("mover", 4, pool="q")
    them = (mover, tenant("next", 4))
    plan = decide(Cluster(START, (node(cores=4), node("n1", 4, "q")), (pool(), pool("q", "q")), them))
    assert removed(plan) == {"mover": Reason.NODE_LOST}
    assert reason(plan, "next") is Reason.NO_ROOM


def test_a_pool_that_can_not_be_followed_lets_nobody_in_and_throws_nobody_out_but_its_guard_goes_on() -> None:
    them = (running("a", 4, least=4), tenant("b"))
    seen = cluster(
        *them, invalid="spec.schedule.timeZone is 'Mars', which is no time zone", objectives=LIMITS, reading=CALM
    )
    plan = decide(seen)
    assert plan.actions == ()
    assert "'Mars'" in plan.tenants[them[1].key].message
    broken = replace(seen.pools[0], reading=BROKEN, guard=Guard(Stage.SUSPEND_HALF, START - timedelta(minutes=1)))
    assert removed(decide(replace(seen, pools=(broken,)))) == {"a": Reason.SUSPENDED_FOR_SLO}


def test_a_tenant_that_can_not_be_followed_is_not_let_in_and_says_why() -> None:
    plan = decide(cluster(tenant("a", invalid="spec.deadline is 'never'")))
    assert not released(plan)
    assert reason(plan, "a") is Reason.INVALID
    assert "'never'" in next(iter(plan.tenants.values())).message


def test_no_job_is_asked_for_again_so_long_as_its_refusal_is_fresh() -> None:
    refused = tenant("a", has_job=False, not_started=START, not_started_why="no such field")
    seen = replace(cluster(refused), now=START + timedelta(minutes=9))
    plan = decide(seen)
    assert plan.actions == ()
    assert "no such field" in plan.tenants[refused.key].message
    again = decide(replace(seen, now=START + timedelta(minutes=10)))
    assert [type(a) for a in again.actions] == [CreateJob, Release]


def test_one_whose_range_was_cut_below_what_it_has_is_brought_down_to_it() -> None:
    cut = replace(running("a", 8, least=2), max_cores=4)
    plan = decide(cluster(cut, resizable=True))
    assert [(a.cores, a.reason) for a in plan.actions if isinstance(a, Resize)] == [(4, Reason.RANGE_CHANGED)]
    assert plan.actions[0].message == "it asks for 2 to 4 cores now: it has 4 on n0"
    assert decide(cluster(cut)).actions == ()
