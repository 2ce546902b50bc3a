from __future__ import annotations

from kinroute.replay.inside import family_tree, timeline
from kinroute.replay.results import Family, Member, Sample, TierSample


def member(name: str, parent: str | None, state: str = "idle", **blocks: int) -> Member:
    return Member(
        f"0/{name}",
        parent and f"0/{parent}",
        "root",
        state,
        **{"device": 0, "host": 0, "disk": 0, "dropped": 0} | blocks,
    )


def test_a_family_is_drawn_with_children_below_their_parent_by_where_their_blocks_are() -> None:
    family = Family(
        0,
        120.0,
        (
            member("child", "root", "demoted", device=3, dropped=1),
            member("root", None, device=5),
            member("grandchild", "child", host=2),
            member("orphan", "gone", disk=4),
        ),
    )

    figure = family_tree(family)

    labels = [label.replace("\u00a0", " ") for label in figure.layout["yaxis"]["ticktext"]]
    assert labels == ["root · idle", "└ child · demoted", "    └ grandchild · idle", "orphan · idle"]
    assert {bars["name"]: bars["x"] for bars in figure.data} == {
        "device": [5, 0, 0, 0], "device, demoted": [0, 3, 0, 0], "host": [0, 0, 2, 0], "disk": [0, 0, 0, 4],
        "dropped": [0, 1, 0, 0],
    }  # fmt: skip
    assert (
        figure.says
        == "4 conversations of one session after 2 simulated minutes: 14 of 15 blocks are still in some tier."
    )


def test_a_timeline_stacks_each_tier_to_all_of_its_pages() -> None:
    device = TierSample(total=10, free=1, held=2, idle=6, moving=1, demoted=4)
    host = TierSample(total=4, free=4, held=0, idle=0, moving=0, demoted=0)
    figure = timeline([Sample(60.0 * at, {"device": device, "host": host}, 3, 1) for at in range(3)])

    stacked = {
        tier: [one["y"][0] for one in figure.data if one.get("stackgroup") == tier] for tier in ("device", "host")
    }
    assert {tier: sum(pages) for tier, pages in stacked.items()} == {"device": 10, "host": 4}
    assert figure.says == "Pages of each tier over 2.0 simulated minutes; 9 blocks were demoted and 3 dropped."
