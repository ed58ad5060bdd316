"""Models that train by transformers' own classes, and the properties that are found of them."""

import pytest
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlcore.spi import ModelError
from rlcore_torchkit import requirements
from rlcore_torchkit.architectures.decoders import (
    decoder_problems,
    described_family,
    has_states,
    has_unpacked_layers,
    head_scale,
    layer_windows,
    layers_of,
    length_problems,
)

GEMMA = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
BIG_BIRD = {"model_type": "big_bird", "architectures": ["BigBirdForCausalLM"]}
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20}


def found(trusted=False, **content):
    return [problem.found for problem in decoder_problems(content, "model/config.json", trust_remote_code=trusted)]


@pytest.mark.parametrize("layers", [None, ["sliding_attention", "full_attention"], ["mamba", "attention", "moe"]])
def test_a_class_of_transformers_is_fine(layers):
    assert found(**BIG_BIRD, attention_type="original_full") == []
    assert found(**GEMMA, layer_types=layers) == []
    assert described_family(GEMMA) is None


def test_a_described_family_that_departs_from_its_description_trains_by_its_class():
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert described_family(mistral).model_type == "mistral"
    assert described_family({**mistral, "sliding_window": 32}) is None
    assert found(**{**mistral, "sliding_window": 32}) == []
    assert found(**{**mistral, "hidden_size": "wide"}) == ['hidden_size = "wide" (a string)']


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model_type": "gpt9", "architectures": ["GPT9ForCausalLM"]}, "model_type gpt9"),
        ({**GEMMA, "architectures": ["Gemma3TextModel"]}, "architecture Gemma3TextModel"),
        ({**GEMMA, "architectures": None}, "architecture none"),
        ({**GEMMA, "text_config": {"hidden_size": 3}}, "a text_config, as models of images or sound have"),
        (BIG_BIRD, 'attention_type "block_sparse", which sees later tokens'),
        ({**BIG_BIRD, "attention_type": "block_sparse"}, 'attention_type "block_sparse", which sees later tokens'),
    ],
)
def test_others_are_refused(content, expected):
    assert found(**content) == [expected]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, True),
        ({"attention_chunk_size": 8192}, True),
        ({"layers_block_type": ["mamba", "attention", "moe"]}, False),
        ({"layer_types": ["sliding_attention", "full_attention"], "attention_chunk_size": None}, False),
        ({}, False),
    ],
)
def test_layers_that_packed_attention_does_not_compute_are_known_by_their_kinds(content, expected):
    assert has_unpacked_layers(content) == expected
    assert found(**GEMMA, **content) == []


@pytest.mark.parametrize("model_type", ["gpt9", "gemma3_text"])
def test_a_class_that_is_newer_than_transformers_is_refused_with_the_version_that_has_it(model_type):
    config = {"model_type": model_type, "architectures": ["GPT9ForCausalLM"], "transformers_version": "99.1.0"}
    (problem,) = decoder_problems(config, "model/config.json", trust_remote_code=False)
    assert "transformers>=99.1.0" in problem.remedy


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "transformers 9.9 is the first that knows it: pip install 'transformers>=9.9,<5.25'"),
        (
            {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
            "transformers 9.9 is the first that knows it: pip install 'transformers>=9.9,<5.25'; or read the code, and then "
            "set model.trust_remote_code to true",
        ),
        (
            {"model_type": "gpt8", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}, "transformers_version": "99.1.0"},
            "Read it, and then set model.trust_remote_code to true",
        ),
        ({"model_type": "gpt8"}, "Correct it, or give the class as a file: docs/models.md, A model that is new"),
    ],
    ids=["known from a version on", "with code of its own", "with code of its own alone", "unknown"],
)
def test_a_model_type_that_transformers_lacks_is_refused_with_what_to_do(content, expected, monkeypatch):
    monkeypatch.setitem(requirements.FIRST_VERSIONS, "gpt9", "9.9")
    config = {"model_type": "gpt9", "architectures": ["GPT9ForCausalLM"], **content}
    (problem,) = decoder_problems(config, "model/config.json", trust_remote_code=False)
    assert problem.remedy == expected


def test_first_versions_are_those_of_the_installed_transformers():
    here = requirements.installed_version("transformers")
    due = {family for family, first in requirements.FIRST_VERSIONS.items() if Version(first) <= here}
    assert requirements.FIRST_VERSIONS.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() == due


def test_code_of_a_models_own_is_run_only_where_the_recipe_trusts_it():
    own = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    assert found(**own) == ["model_type mine, whose code comes with the model"]
    assert found(trusted=True, **own) == []


def test_code_of_a_models_own_has_to_be_beside_its_config(tmp_path):
    own = {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    own["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine", "AutoModel": "acme/mine--mine.Mine"}
    file = tmp_path / "config.json"
    file.write_text("{}")
    (problem,) = decoder_problems(own, str(file), trust_remote_code=True)
    assert problem.found == "no mine.py, which auto_map names"
    (tmp_path / "mine.py").write_text("")
    assert not list(decoder_problems(own, str(file), trust_remote_code=True))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_angles_of_longrope_are_refused_beyond_their_first_table(key):
    config = {key: {"type": "longrope"}, "original_max_position_embeddings": 64}
    assert [len(list(length_problems(config, "model", length))) for length in (64, 65)] == [0, 1]
    assert not list(length_problems({key: {"full_attention": {"rope_type": "yarn"}}}, "model", 10**6))


def test_the_outermost_list_of_as_many_modules_as_there_are_layers_is_the_decoders():
    config = AutoConfig.for_model("mixtral", **SIZES, num_hidden_layers=2, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config)
    assert layers_of(model) is model.model.layers
    model.model.layers = nn.ModuleList([model.model.layers[0]])
    with pytest.raises(ModelError, match="none in MixtralForCausalLM"):
        layers_of(model)


def test_what_configs_say_of_states_windows_and_scales():
    kinds = ["linear_attention", "full_attention"]
    gdn = AutoConfig.for_model("qwen3_next", layer_types=kinds, num_hidden_layers=2)
    gemma = AutoConfig.for_model("gemma3_text", layer_types=["sliding_attention", *kinds[1:]], num_hidden_layers=2)
    assert [has_states(nn.Module.__new__(holding(config))) for config in (gdn, gemma)] == [True, False]
    assert [layer_windows(config) for config in (gdn, gemma, AutoConfig.for_model("phi3"))] == [0, 1, None]
    assert [head_scale(AutoConfig.for_model(name)) for name in ("cohere", "llama")] == [0.0625, 1.0]
    assert head_scale(AutoConfig.for_model("granite", logits_scaling=8.0)) == 0.125


def holding(config):
    """A class whose objects have this config."""
    return type("Model", (nn.Module,), {"config": config})
