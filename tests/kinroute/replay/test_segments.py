from __future__ import annotations

from hypothesis import given, settings

from kinroute.replay.segments import Segments, segments_of
from tests.kinroute.replay.words import Asked, Words, load, words


def spelled(segments: Segments, request: int) -> list[tuple[int, int]]:
    """(segment, place in it) of every block of a request."""
    return [(int(one), at) for one in segments.path(request) for at in range(int(segments.length[one]))]


def test_blocks_that_nothing_parts_are_one_segment() -> None:
    segments = segments_of(load(Words(0, 1, "abcd"), Words(9, 1, "abcdef")), role="context")

    assert segments.length.tolist() == [4, 2]
    assert segments.parent.tolist() == [-1, 0]
    assert segments.depth.tolist() == [0, 4]
    assert [segments.prompt(one).tolist() for one in (0, 1)] == [[0], [0, 1]]


def test_a_fork_parts_a_segment() -> None:
    segments = segments_of(load(Words(0, 1, "abcd"), Words(9, 1, "abx")), role="context")

    assert segments.length.tolist() == [2, 2, 1]
    assert [segments.prompt(one).tolist() for one in (0, 1)] == [[0, 1], [0, 2]]


def test_an_answer_is_part_of_the_path_only_where_answers_are_kept() -> None:
    asked = load(Words(0, 1, "ab", answer="cd"), Words(9, 1, "abcdef"))

    kept, left = segments_of(asked, role="aggregated"), segments_of(asked, role="context")

    assert [kept.length[kept.path(one)].tolist() for one in (0, 1)] == [[2, 2], [2, 2, 2]]
    assert [left.length[left.path(one)].tolist() for one in (0, 1)] == [[2], [2, 4]]
    assert kept.prompt_blocks.tolist() == left.prompt_blocks.tolist() == [2, 6]


def test_a_block_that_an_answer_does_not_fill_is_not_there() -> None:
    request = Asked(0.0, 1.0, ((0, 2),), ((2, 2),), output_tokens=8)

    segments = segments_of([request], role="aggregated")

    # The eighth token is not computed.
    assert segments.length[segments.path(0)].tolist() == [2, 1]


def test_the_last_block_of_a_prompt_that_was_there_before_stands_alone() -> None:
    segments = segments_of(load(Words(0, 1, "abcd"), Words(9, 1, "abcd")), role="context")

    assert segments.length.tolist() == [3, 1]
    assert segments.is_repeated_end.tolist() == [False, True]


def test_one_id_in_two_places_is_two_blocks() -> None:
    asked = [Asked(0.0, 1.0, ((0, 9),), (), 1), Asked(1.0, 1.0, ((5, 2), (20, 1)), (), 1)]

    segments = segments_of(asked, role="context")

    assert [segments.length[segments.path(one)].sum() for one in (0, 1)] == [9, 3]
    assert not set(segments.path(0)) & set(segments.path(1))


@settings(max_examples=60, deadline=None)
@given(words())
def test_two_requests_share_the_segments_of_what_their_words_share(requests: list[Words]) -> None:
    segments = segments_of(load(*requests), role="aggregated")

    paths = [one.prompt + one.answer for one in requests]
    for one, word in enumerate(paths):
        assert len(spelled(segments, one)) == len(word)
        assert segments.prompt_blocks[one] == len(requests[one].prompt)
        for other in range(one):
            shared = zip(spelled(segments, one), spelled(segments, other), strict=False)
            alike = zip(word, paths[other], strict=False)
            same = [mine == theirs for mine, theirs in shared]
            assert same == [word[: at + 1] == paths[other][: at + 1] for at, _ in enumerate(alike)]
    last = segments.parent + 1
    assert (last <= range(len(last))).all(), "a parent comes after its child"
