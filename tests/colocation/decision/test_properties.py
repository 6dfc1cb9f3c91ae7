"""What holds of every decision, on clusters made up by hypothesis."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from services.colocation.decision.actions import Evict, Phase, Release, Resize, Suspend
from services.colocation.decision.capacity import claim, freed_cores
from services.colocation.decision.decide import decide
from services.colocation.decision.model import Cluster, EvictionOrder, Guard, Pool, Preemption, Stage, Tenant
from tests.colocation.clusters import BROKEN, CALM, LIMITS, NEAR, START, apply, held, node, pool, tenant

NODES = st.lists(
    st.builds(
        lambda cores, others, schedulable, owner: node("n", cores, owner, others=others, schedulable=schedulable),
        st.integers(1, 24),
        st.integers(0, 8000),
        st.booleans() | st.just(True),
        st.sampled_from(["p", "q", "r"]),
    ),
    min_size=1,
    max_size=5,
).map(lambda nodes: tuple(replace(each, name=f"n{i}") for i, each in enumerate(nodes)))

POOLS = st.builds(
    lambda baseline, reserved, percent, order, reading, stage: (
        pool(
            baseline_cores=baseline,
            reserved_cores=reserved,
            cpu_percent=percent,
            eviction_order=order,
            objectives=LIMITS,
            reading=reading,
            guard=Guard(stage, START - timedelta(minutes=1)),
        ),
        pool("q", "q"),
        pool("late", "p", created=START),
    ),
    st.integers(0, 4),
    st.integers(0, 2),
    st.integers(10, 100),
    st.sampled_from(EvictionOrder),
    st.sampled_from([CALM, NEAR, BROKEN, None]),
    st.sampled_from(Stage),
)


@st.composite
def tenants(draw: st.DrawFn) -> tuple[Tenant, ...]:
    count = draw(st.integers(0, 12))
    made = []
    for index in range(count):
        least = draw(st.integers(1, 8))
        made.append(
            tenant(
                f"t{index}",
                least,
                least + draw(st.integers(0, 6)),
                namespace=draw(st.sampled_from(["a", "b"])),
                pool=draw(st.sampled_from(["p", "p", "q", "late", "none"])),
                priority=draw(st.integers(0, 20)),
                preemption=draw(st.sampled_from(Preemption)),
                created=START - timedelta(minutes=draw(st.integers(0, 30))),
                has_job=draw(st.booleans()),
                deadline=draw(st.none() | st.integers(0, 60).map(lambda late: START + timedelta(seconds=late))),
            )
        )
    return tuple(made)


CLUSTERS = st.builds(
    lambda nodes, pools, them, resizable: Cluster(START, nodes, pools, them, resizable),
    NODES,
    POOLS,
    tenants(),
    st.booleans(),
)
# Clusters in which something runs are reached as real ones are: by decisions, then by what changes around them.
DISTURBANCES = st.lists(st.tuples(st.sampled_from([CALM, NEAR, BROKEN, None]), st.integers(0, 20_000)), max_size=6)


def disturbed(cluster: Cluster, reading: object, others: int) -> Cluster:
    first = replace(cluster.nodes[0], others=others)
    pools = tuple(replace(each, reading=reading) if each.objectives else each for each in cluster.pools)  # type: ignore[arg-type]
    return replace(cluster, nodes=(first, *cluster.nodes[1:]), pools=pools)


def owner_of(cluster: Cluster) -> dict[str, Pool]:
    owned = claim(cluster.nodes, cluster.pools).owned
    pools = {each.name: each for each in cluster.pools}
    return {each.name: pools[name] for name, nodes in owned.items() for each in nodes}


@settings(deadline=None, max_examples=300)
@given(CLUSTERS, DISTURBANCES, st.booleans())
def test_tenants_never_hold_more_than_serving_leaves(
    cluster: Cluster, changes: list[tuple[object, int]], stubborn: bool
) -> None:
    for reading, others in [(CALM, 0), (CALM, 0), *changes]:
        cluster = disturbed(cluster, reading, others)
        plan = decide(cluster)
        cluster = apply(cluster, plan, stubborn=stubborn)
        owners, cores = owner_of(cluster), held(cluster)
        for each in cluster.nodes:
            ended = each.leaving // 1000 if any(isinstance(a, Release | Resize) for a in plan.actions) else 0
            allowed = freed_cores(each, owners[each.name]) if each.name in owners else 0
            assert cores[each.name] <= allowed, (each, plan)
            released = [a for a in plan.actions if isinstance(a, Release) and a.node == each.name]
            if released:  # newcomers do not get the cores of those that have not ended
                assert cores[each.name] + ended <= allowed, (each, plan)


@settings(deadline=None, max_examples=300)
@given(CLUSTERS, DISTURBANCES)
def test_every_tenant_has_one_act_at_most_and_a_report_within_its_range(
    cluster: Cluster, changes: list[tuple[object, int]]
) -> None:
    for reading, others in [(CALM, 0), *changes]:
        cluster = disturbed(cluster, reading, others)
        plan = decide(cluster)
        assert set(plan.tenants) == {each.key for each in cluster.tenants}
        by_key = {each.key: each for each in cluster.tenants}
        moved = [a.key for a in plan.actions if isinstance(a, Release | Resize | Suspend | Evict)]
        assert len(moved) == len(set(moved))
        for key, report in plan.tenants.items():
            assert report.message
            if report.phase is Phase.RUNNING:
                assert by_key[key].min_cores <= report.cores <= by_key[key].max_cores
        positions = [r.position for k, r in plan.tenants.items() if r.position and by_key[k].pool == "p"]
        assert sorted(positions) == list(range(1, len(positions) + 1))
        cluster = apply(cluster, plan)


@settings(deadline=None, max_examples=200)
@given(CLUSTERS)
def test_the_same_moment_gives_the_same_plan_in_any_order(cluster: Cluster) -> None:
    plan = decide(cluster)
    mirrored = replace(cluster, nodes=cluster.nodes[::-1], pools=cluster.pools[::-1], tenants=cluster.tenants[::-1])
    again = decide(mirrored)
    assert set(plan.actions) == set(again.actions)
    assert plan.tenants == again.tenants


@settings(deadline=None, max_examples=200)
@given(CLUSTERS)
def test_a_calm_cluster_settles_and_then_nothing_more_is_done(cluster: Cluster) -> None:
    cluster = replace(
        cluster,
        pools=tuple(replace(each, guard=Guard(), reading=CALM if each.objectives else None) for each in cluster.pools),
    )
    # Aging alone could make a tenant a preemptor's equal, never its victim, so a few rounds must be enough.
    for _ in range(3 + len(cluster.tenants)):
        cluster = apply(cluster, decide(cluster), seconds=61)
    plan = decide(cluster)
    assert plan.actions == ()


@settings(deadline=None, max_examples=200)
@given(CLUSTERS, DISTURBANCES)
def test_while_the_metrics_are_unknown_or_near_a_limit_nobody_comes_and_nobody_grows(
    cluster: Cluster, changes: list[tuple[object, int]]
) -> None:
    for reading, others in [(CALM, 0), *changes, (NEAR, 0), (None, 0)]:
        cluster = disturbed(cluster, reading, others)
        plan = decide(cluster)
        if reading is not CALM:
            mine = {each.key: each for each in cluster.tenants if each.pool == "p"}
            for action in plan.actions:
                assert not (isinstance(action, Release) and action.key in mine)
                if isinstance(action, Resize) and action.key in mine:
                    placement = mine[action.key].placement
                    assert placement is not None
                    assert action.cores < placement.cores
        cluster = apply(cluster, plan)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 8), st.integers(0, 100), st.integers(1, 3))
def test_nobody_starves_behind_a_stream_of_more_important_and_smaller_tenants(cores: int, gap: int, rate: int) -> None:
    patient = tenant("patient", cores, created=START)
    cluster = Cluster(START, (node("n0", cores), node("n1", cores)), (pool(),), (patient,), False)
    born = 0
    # Those that came in the first `gap` minutes are ahead of it for good; all later ones are behind it one day.
    for _ in range(gap * (1 + rate) + 8 * cores + 8):
        newcomers = tuple(tenant(f"small{born + i}", priority=gap, created=cluster.now) for i in range(rate))
        born += rate
        # Each small one runs for two minutes.
        left = tuple(
            each
            for each in cluster.tenants
            if each.placement is None or each.changed is None or cluster.now - each.changed < timedelta(minutes=2)
        )
        cluster = replace(cluster, tenants=(*left, *newcomers))
        plan = decide(cluster)
        if any(isinstance(a, Release) and a.key == patient.key for a in plan.actions):
            return
        cluster = apply(cluster, plan, seconds=60)
    raise AssertionError("never released")
