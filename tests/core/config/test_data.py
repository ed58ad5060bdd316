"""Several data sets in place of one."""

from rlcore.config.data import DataConfig, DatasetConfig, MixedRowsConfig


def test_each_set_has_its_own_rows_and_what_is_said_of_all() -> None:
    sets = {
        "a": MixedRowsConfig(source="jsonl", path="a.jsonl", limit=3, environment="math"),
        "b": MixedRowsConfig(weight=2.0),
    }
    config = DatasetConfig(mix=sets, shuffle=False, on_long_prompt="drop", max_prompt_tokens=9)
    shared = {"shuffle": False, "on_long_prompt": "drop", "max_prompt_tokens": 9}
    assert config.parts() == {
        "a": DatasetConfig(source="jsonl", path="a.jsonl", limit=3, **shared),  # type: ignore[arg-type]
        "b": DatasetConfig(**shared),  # type: ignore[arg-type]
    }
    assert DatasetConfig().parts() == {}
    assert DataConfig(train=config, evaluation=DatasetConfig()).environment_of_set == {"a": "math"}
