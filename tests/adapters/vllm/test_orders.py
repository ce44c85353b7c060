"""Names of a prompt's pages, and the parameters that travel with a request."""

from typing import Any

import numpy as np
import pytest

from pdkv.adapters.vllm.orders import Prompt, Remote, remote_of, token_column
from pdkv.kvcache.page_hash import chain, namespace_seed, tail_hash

PRINT = bytes(range(32))


def names(tokens: list[int], adapter_key: str = "", **more: str) -> list[bytes]:
    return [bytes(h) for h in Prompt(np.array(tokens, np.uint64), **more).names(PRINT, adapter_key, 4)]


def test_pages_are_named_by_the_chain_of_any_pdkv_node() -> None:
    seed = namespace_seed(PRINT, "", "")
    full = chain(list(range(8)), page_tokens=4, seed=seed)
    assert names(list(range(8))) == list(full)
    assert names(list(range(10))) == [*full, tail_hash(full.at(1), [8, 9])]
    assert names([1, 2]) == [tail_hash(seed, [1, 2])]


def test_a_tail_of_other_tokens_or_length_has_another_name() -> None:
    assert len({names([0, 1, 2, 3, *rest])[1] for rest in ([4], [5], [4, 5], [5, 4])}) == 4


def test_salt_and_key_change_every_name() -> None:
    assert not set(names(list(range(8)))) & set(names(list(range(8)), cache_salt="a"))
    assert not set(names(list(range(8)))) & set(names(list(range(8)), adapter_key="lora x"))


def test_an_items_places_are_named_by_the_item_and_what_was_before_it_is_not() -> None:
    tokens = [1, 2, 3, 4, 9, 9, 9, 9]
    one, other = (Prompt(token_column(tokens, [(4, 4, item)])).names(PRINT, "", 4) for item in ("cat", "dog"))
    assert one.at(0) == other.at(0) == names(tokens)[0], "text before an item is shared, as the engine shares it"
    assert len({one.at(1), other.at(1), names(tokens)[1]}) == 3
    assert token_column(tokens, [(6, 9, "cat")]).size == 8, "an item that ends after the prompt"


def test_a_remote_is_taken_from_nixl_connectors_parameters() -> None:
    assert remote_of({"remote_host": "h", "remote_port": 5600, "tp_size": 2}) == Remote("h", 5600, 2)
    assert remote_of({"remote_host": "h", "remote_port": 5600}) == Remote("h", 5600, 1)
    for host in ("10.0.0.1", "[fd00::1]", "a_b.c-d.example", "h" * 255):
        assert remote_of({"remote_host": host, "remote_port": 5600}) == Remote(host, 5600, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_host": None},
        {"remote_host": ""},
        {"remote_host": "h" * 256},
        {"remote_host": "h\nother"},
        {"remote_host": "fd00::1"},
        {"remote_host": ["h"] * 1000},
        {"remote_port": 10**1000},
        {"remote_port": "5600"},
        {"remote_port": 70000},
        {"tp_size": 0},
        {"tp_size": True},
    ],
)
def test_what_is_wrong_with_them_is_said(wrong: dict[str, Any]) -> None:
    said = remote_of({"remote_host": "h", "remote_port": 5600, "tp_size": 1} | wrong)
    assert isinstance(said, str)
    assert next(iter(wrong)) in said
    assert len(said) < 100, "it goes to the log"
    assert said.isprintable()
