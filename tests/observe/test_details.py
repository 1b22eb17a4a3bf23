"""Details, what only one kind of stage counts: over workers, passes, deaths of hosts and windows; and how they look."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from streamline.core.figures import Detail, Details, StageStats, later, since, together
from streamline.core.meters import Meters, Ongoing, StageMeter
from streamline.observe.stats import Stats, stats_of
from streamline.observe.tables import brief


def three(count: float, total: float, now: float, part: str = "") -> Details:
    return Detail("served", count, part), Detail("taken", total, part, "total"), Detail("cycle", now, part, "now")


def test_counts_go_on_where_a_stage_is_opened_again_and_all_else_is_as_it_is_now() -> None:
    assert later(three(5, 50, 2), three(1, 51, 3)) == three(6, 51, 3)
    assert later((), three(1, 2, 3)) == three(1, 2, 3)
    assert later(three(1, 2, 3), ()) == three(1, 2, 3)
    assert later(three(1, 2, 3, "web"), three(4, 5, 6, "code")) == (*three(1, 2, 3, "web"), *three(4, 5, 6, "code"))


def test_workers_are_added_up_and_of_what_stands_the_least_counts() -> None:
    assert together([three(1, 10, 7), three(2, 20, 5), three(4, 40, 6)]) == three(7, 70, 5)
    assert together([three(1, 2, 3), ()]) == three(1, 2, 3)


def test_a_window_has_what_was_counted_in_it() -> None:
    assert since(three(5, 50, 2), three(6, 60, 4)) == three(1, 60, 4)
    assert since((), three(6, 60, 4)) == three(6, 60, 4)


def test_details_are_computed_on_demand_and_summed_over_openings() -> None:
    meter = StageMeter("regenerate", "regenerate", 0)
    assert meter.details == ()
    told = [three(1, 1, 0)]
    meter.details_from(lambda: told[0])
    told[0] = three(2, 2, 0)
    assert meter.details == meter.totals().details == three(2, 2, 0)
    meter.details_from(lambda: three(10, 1, 1))
    told[0] = three(100, 100, 100)  # the opening before is over
    assert meter.details == three(12, 1, 1)


def test_details_of_a_host_are_shown_and_those_of_one_that_died_stay() -> None:
    there, here = StageMeter("mix", "mix", 0), StageMeter("mix", "mix", 0)
    there.details_from(lambda: three(5, 50, 2))
    here.show(there.totals(), Ongoing())
    assert here.details == three(5, 50, 2)
    here.stop(0.0)
    assert here.details == three(5, 50, 2)
    successor = StageMeter("mix", "mix", 0)
    successor.details_from(lambda: three(1, 48, 1))
    here.show(successor.totals(), Ongoing())
    assert here.details == three(6, 48, 1)


def stats_with(*workers: Details, name: str = "mix", kind: str = "mix") -> Stats:
    meters = Meters(0.0)
    for shard, details in enumerate(workers):
        meters.stage(name, kind, shard).details_from(lambda details=details: details)  # type: ignore[misc]
    return stats_of(meters)


def test_a_detail_is_had_by_its_name_and_its_part() -> None:
    (stage,) = stats_with(three(1, 2, 3, "web"), three(1, 2, 4, "web")).stages
    assert (stage.detail("served", "web"), stage.detail("taken", "web"), stage.detail("cycle", "web")) == (2, 4, 3)
    assert [worker.details for worker in stage.per_worker] == [three(1, 2, 3, "web"), three(1, 2, 4, "web")]
    with pytest.raises(KeyError, match="mix has no detail 'served'; it has 'served' of 'web', 'taken' of 'web'"):
        stage.detail("served")
    with pytest.raises(KeyError, match="it has none"):
        StageStats(name="it", kind="map").detail("cycle", "web")


def test_details_are_json() -> None:
    found = json.loads(json.dumps(asdict(stats_with(three(1, 2, 3, "web")))))
    assert found["stages"][0]["details"][0] == {"name": "served", "value": 1, "part": "web", "how": "count"}


def test_a_table_has_a_row_for_each_part_and_units_and_says_where_workers_differ() -> None:
    web, code = three(1200, 2, 3, "web"), (Detail("served", 1, "code"), Detail("weight", 0.5, "code", "now"))
    lines = str(stats_with((*web, *code), three(1, 2, 5, "web"))).splitlines()
    assert lines[3:] == [
        "mix  served  taken  cycle",
        "web   1,201      4    3-5",
        "mix   served  weight",
        "code       1     0.5",
    ]
    cycles = Detail("generating_s", 1.5), Detail("copied_bytes", 12_345)
    stats = stats_with(cycles, name="again", kind="regenerate")
    assert str(stats).splitlines()[3:] == ["regenerate  generating   copied", "again           1.50 s  12.3 kB"]
    other = stats_with(three(1, 2, 3, "web"), name="0/mix")
    assert str(other).splitlines()[4].startswith("0/mix/web ")


def test_a_line_has_a_stages_details_in_brief() -> None:
    (mixture,) = stats_with((*three(5, 6, 7, "web"), *three(1, 2, 3, "code"))).stages
    assert brief(mixture) == "mix served  web 5  code 1"
    (cycles,) = stats_with(
        (Detail("cycle", 3, how="now"), Detail("waited_s", 0.25)), name="again", kind="regenerate"
    ).stages
    assert brief(cycles) == "regenerate(again)  cycle 3  waited 0.25 s"
