"""The lab's pages, as a user runs them, with few steps: what they print is true, and
each leaves its picture.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    def run_page(name: str, *options: str) -> str:
        command = [
            sys.executable,
            ROOT / "examples" / "lab" / f"{name}.py",
            "--out",
            tmp_path,
            *options,
        ]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert page.returncode == 0, page.stderr
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
        return page.stdout

    return run_page


def numbers(pattern: str, text: str) -> list[list[float]]:
    """What the groups of each match say."""
    return [
        [float(group.replace(",", "")) for group in match.groups()]
        for match in re.finditer(pattern, text)
    ]


@pytest.mark.long
def test_an_optimizer_of_ones_own_keeps_the_laws_and_learns_like_adamw(run):
    said = run("new_optimizer", "--steps", "6")
    assert "keeps the laws" in said
    (first, adamw, _), (also_first, accord, _) = numbers(
        r"loss ([\d.]+) -> ([\d.]+), ([\d,]+) bytes", said
    )
    assert first == also_first and adamw < 0.9 * first and accord < 0.9 * first


def test_round_robin_and_a_buffer_for_each_block_end_their_copies_sooner_than_declaration_order(
    run,
):
    said = run("orders", "--ranks", "4")
    ends = [end for (end,) in numbers(r"all is on the hosts at ([\d.]+) backwards", said)]
    assert (
        ends == sorted(ends, reverse=True) and ends[0] > 1.3 > 1.2 > ends[1] > 1 and len(ends) == 3
    )
    blocks = numbers(r"rank \d+ has parts of blocks (\d+) to (\d+)", said)
    assert blocks[:4] == [[0, 2], [3, 5], [6, 8], [9, 11]]  # declaration: a stretch for each
    assert blocks[8:] == [[0, 11]] * 4


@pytest.mark.long
def test_workers_that_talk_every_k_steps_send_a_kth_and_learn(run):
    said = run("local_sgd", "--steps", "32")
    together, four, sixteen = numbers(r"loss ([\d.]+) after 32 steps, ([\d.]+) MB", said)
    assert together[1] == pytest.approx(4 * four[1], abs=0.05)
    assert together[1] == pytest.approx(16 * sixteen[1], abs=0.1)
    assert together[0] < four[0] < 3 and sixteen[0] < 3


@pytest.mark.long
def test_each_rank_of_a_model_that_is_too_big_holds_an_eighth_as_planned(run):
    said = run("too_big", "--steps", "6")
    assert "stage 1: fits no number of ranks" in said and "stage 3: fits from 8 ranks on" in said
    ((whole,),) = numbers(r"whole, the state would be ([\d,]+) bytes", said)
    held = numbers(r"rank \d holds ([\d,]+) bytes, planned were ([\d,]+)", said)
    assert len(held) == 8 and all(
        own == planned and 1 <= own / (whole / 8) < 1.02 for own, planned in held
    )
    ((first, last),) = numbers(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert last < first


@pytest.mark.long
def test_a_stage_that_changes_in_mid_training_changes_the_losses_by_rounding_only(run):
    said = run("change_stage", "--steps", "12")
    assert re.findall(r"stage \d on \d ranks", said) == [
        "stage 1 on 2 ranks",
        "stage 3 on 4 ranks",
        "stage 2 on 3 ranks",
    ]
    ((difference,),) = numbers(r"largest difference from one rank ([\d.e-]+)", said)
    assert difference < 1e-5
    ((first, last),) = numbers(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert last < first


@pytest.mark.long
def test_parameters_in_8_bits_cost_little_and_what_4_bits_of_gradients_lose_can_be_remembered(run):
    said = run("quantised_gathers", "--steps", "24")
    points = numbers(
        r"(\d) bits in blocks of (\d+): ([\d.]+) bytes for an element, error ([\d.e+-]+)", said
    )
    for bits in (8, 4):
        by_block = [(nbytes, error) for found, _, nbytes, error in points if found == bits]
        assert len(by_block) == 5 and by_block == sorted(
            by_block, key=lambda point: (-point[0], point[1])
        )
    runs = numbers(r"loss ([\d.]+) -> ([\d.]+), ([\d,]+) bytes sent in a step", said)
    (first, exact, whole), gathers, alone, remembered, both = runs
    assert (
        exact < 0.7 * first
        and abs(gathers[1] - exact) < abs(alone[1] - exact)
        and remembered[1] < alone[1]
    )
    assert whole / both[2] > 4 and alone[2] == remembered[2]


@pytest.mark.long
def test_signs_of_the_momentum_teach_nearly_as_much_as_all_of_it(run):
    said = run("one_bit_adam", "--steps", "60")
    assert "the codec keeps the laws of collectives" in said
    adam, signs, forgetful = numbers(r"loss ([\d.]+) -> ([\d.]+), ([\d.]+) MB", said)
    assert adam[2] / signs[2] > 3 and signs[2] == forgetful[2]
    assert adam[1] < signs[1] < forgetful[1] < adam[0]


@pytest.mark.long
def test_three_optimizers_learn_the_text_and_each_step_has_its_seconds(run):
    said = run("matrix_optimizers", "--steps", "12")
    found = numbers(
        r"loss ([\d.]+) -> ([\d.]+) after 12 steps, ([\d.]+) after ([\d.]+) s; ([\d.]+) ms", said
    )
    assert len(found) == 3 and len({(first, seconds) for first, _, _, seconds, _ in found}) == 1
    assert all(last < first for first, last, *_ in found)


@pytest.mark.long
def test_a_wrong_optimizer_breaks_a_law_and_parts_from_one_rank_in_its_first_update(run):
    said = run("wrong_optimizer", "--steps", "2", "--examples", "5")
    assert "the wrong optimizer breaks a law" in said and "Smallest example" in said
    assert "the right one breaks none" in said
    ((step,),) = numbers(r"first beyond rounding: step (\d+), weight of unit", said)
    assert step == 0 and "The runs differ by rounding only" in said
    losses = numbers(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert len(losses) == 4 and all(last < first for first, last in losses)
