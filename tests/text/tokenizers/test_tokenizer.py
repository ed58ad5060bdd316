"""The tokenizer of a model directory: text, special tokens, chat templates, stop tokens, and what can be missing."""

import builtins
import json
import pickle
import shutil
import string

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config.model import ModelConfig
from rlcore.spi import DataError, ModelError
from rlcore.thoughts import without_thoughts
from rlcore_model_files.directory import model_problems
from rlcore_text.tokenizers import hub_reach
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.huggingface.companion_files import companion_names
from rlcore_torchkit.testing.models import END_OF_TEXT, make_tokenizer


@pytest.fixture
def directory(tmp_path):
    """A tokenizer directory to change."""
    make_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def load(directory, **options):
    return load_tokenizer(ModelConfig(path=str(directory), **options))


def set_tokenizer_option(directory, **options):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


# Hypothesis draws texts from the sources too, of which a special token is one that is no text.
TEXT = st.text(string.printable, max_size=20).filter(lambda text: "<|" not in text)


@given(texts=st.lists(TEXT, max_size=5))
def test_text_survives_encoding(tokenizer, texts):
    encoded = tokenizer.encode_batch(texts)
    assert [len(tokens) for tokens in encoded] == [len(text) for text in texts]
    assert tokenizer.decode_batch(encoded) == texts
    assert [tokenizer.decode(np.asarray(tokenizer.encode(text), np.int32)) for text in texts] == texts


def test_half_a_character_is_no_text(tokenizer):
    with pytest.raises(DataError, match=r"half a character .* 'b\\ud800'"):
        tokenizer.encode_batch(["a", "b\ud800"])


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_a_text_behind_another_one_begins_with_no_space_of_the_tokenizers(tmp_path, scheme):
    """As SentencePiece's begin a text, such as those of Llama 2 and Mistral."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {symbol: number for number, symbol in enumerate(["</s>", "<unk>", "▁", "a", "b", "c"])}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("ab") == ([2, 3, 4] if scheme == "first" else [3, 4])
    assert tokenizer.encode_behind(["bc", "</s>b", " c", ""]) == [[4, 5], [0, 4], [2, 5], []]
    assert tokenizer.decode([*tokenizer.encode("ab"), *tokenizer.encode_behind(["c"])[0]]) == "abc"


def test_a_tokenizer_that_tells_nothing_of_its_tokens_is_taken_as_it_is(tokenizer):
    """As mistral-common's, which raises where it is asked."""

    class Backend:
        def __call__(self, texts, **_):
            return tokenizer.backend(texts, add_special_tokens=False)

        @property
        def added_tokens_decoder(self):
            raise NotImplementedError

    found = evolve(tokenizer, backend=Backend())
    assert found.encode_behind(["ab"]) == tokenizer.encode_behind(["ab"]) == [tokenizer.encode("ab")]


def test_special_tokens_are_left_out_of_decoded_text(tokenizer):
    assert tokenizer.eos_token_id is not None
    assert tokenizer.encode(END_OF_TEXT) == [tokenizer.eos_token_id]
    assert tokenizer.decode([*tokenizer.encode("12"), tokenizer.eos_token_id]) == "12"


@pytest.mark.parametrize(
    ("begin", "end"), [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|channel>", "<channel|>")]
)
def test_marks_of_thoughts_stay_where_they_are_special_tokens(directory, begin, end):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens([begin, end, "<|user|>"])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = load(directory)
    said = f"{begin}one \\boxed{{1}}{end}two"
    tokens = [tokenizer.encode("<|user|>")[0], *tokenizer.encode(said), tokenizer.eos_token_id]
    assert tokenizer.decode_batch([tokens, np.asarray(tokens[:5], np.int32)]) == [said, f"{begin}one"]
    assert without_thoughts(tokenizer.decode(tokens)) == "two"


def test_messages_go_through_the_chat_template_up_to_the_answer(tokenizer):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert tokenizer.render_chat(messages) == "system: Add.\nuser: 1+1=\nassistant: "


def test_the_recipes_chat_template_replaces_the_tokenizers(directory):
    tokenizer = load(directory, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "[hi]"


@pytest.mark.parametrize("value", ["é\n'\"\\", "😀", True, -3, 1e22])
def test_a_template_reads_the_recipes_variables(directory, value):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ x }}"
    tokenizer = load(directory, chat_template=template, chat_template_kwargs={"x": value})
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == f"hi|{value}"


def test_a_request_sets_variables_over_the_recipes(directory):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ x }}{{ y }}"
    tokenizer = load(directory, chat_template=template, chat_template_kwargs={"x": 1, "y": 2})
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.with_variables({"y": [3]}).render_chat(messages) == "hi|1[3]"
    assert tokenizer.render_chat(messages) == "hi|12"
    assert tokenizer.with_variables({}) is tokenizer
    with pytest.raises(DataError, match="found messages, z; expected"):
        tokenizer.with_variables({"messages": [], "x": 1, "z": 2})


def test_messages_without_a_chat_template(directory):
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"no chat template\. Set model\.chat_template"):
        load(directory).render_chat([{"role": "user", "content": "hi"}])


def test_messages_that_the_chat_template_refuses(directory):
    tokenizer = load(directory, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (0,)), ({}, (0,)), ({"eos_token_id": 7}, (0, 7)), ({"eos_token_id": [9, 0, 7]}, (0, 9, 7))],
)
def test_stop_tokens_are_those_of_tokenizer_and_generation_config(directory, generation, expected):
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = load(directory)
    assert tokenizer.stop_token_ids == expected
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": [9, 0, 7]}, (0, 9, 7)),
        ({"eos_token_id": 7}, (0, 7)),
        ({"text_config": {"eos_token_id": [7]}}, (0, 7)),
        ({"eos_token_id": None}, (0,)),
    ],
)
def test_stop_tokens_are_those_of_config_json_where_there_is_no_generation_config(directory, config, expected):
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2"} | config))
    assert load(directory).stop_token_ids == expected
    (directory / "generation_config.json").write_text("{}")
    assert load(directory).stop_token_ids == (0,)


def test_the_vocabulary_of_a_model_on_the_hub_is_read_where_it_was_fetched(directory, monkeypatch):
    transformers = pytest.importorskip("transformers")
    backend = load(directory).backend
    (directory / "config.json").write_text('{"vocab_size": 7}')
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: backend)

    def cached_file(path, name, **_):
        return str(directory / name) if path == "acme/tiny" and (directory / name).exists() else None

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    monkeypatch.setattr(hub_reach, "why_unreachable", lambda: None)
    assert load_tokenizer(ModelConfig(path="acme/tiny")).vocab_size == 7
    assert load_tokenizer(ModelConfig(path="acme/other")).vocab_size is None


def test_a_tokenizer_without_end_of_sequence(directory):
    set_tokenizer_option(directory, eos_token=None)
    tokenizer = load(directory)
    assert tokenizer.stop_token_ids == ()
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize("bos", [END_OF_TEXT, None])
@pytest.mark.parametrize(("before", "behind"), [(1, 0), (2, 0), (1, 1), (0, 1)])
def test_prompts_begin_as_the_tokenizers_own_settings_say(directory, bos, before, behind):
    assert load(directory).prompt_prefix == ()
    set_tokenizer_option(directory, bos_token=bos)
    assert load(directory).prompt_prefix == ()
    special = {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*[special] * before, {"Sequence": {"id": "A", "type_id": 0}}, *[special] * behind],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
    }
    path.write_text(json.dumps(content))
    tokenizer = load(directory)
    assert tokenizer.prompt_prefix == (0,) * before
    assert 0 not in tokenizer.encode("12")


@pytest.mark.parametrize(
    ("settings", "config", "encoded"),
    [
        ({"tokenizer_class": "ByT5Tokenizer"}, {}, [100, 35, 101]),
        ({}, {"tokenizer_class": "ByT5Tokenizer"}, [100, 35, 101]),
        ({"tokenizer_class": "CanineTokenizer"}, {}, [97, 32, 98]),
        ({"tokenizer_class": "PerceiverTokenizer"}, {}, [103, 38, 104]),
        ({"tokenizer_class": "DiaTokenizer"}, {}, [97, 32, 98]),
    ],
)
def test_a_class_without_a_vocabulary_is_a_tokenizer(tmp_path, settings, config, encoded):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert not {"no tokenizer"} & {problem.found for problem in model_problems(str(tmp_path))}
    tokenizer = load(tmp_path)
    assert tokenizer.encode("a b") == encoded
    assert tokenizer.decode(np.array(encoded, np.int32)) == "a b"
    assert "tokenizer_config.json" in list(companion_names(tmp_path))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "MyT5Tokenizer", "PreTrainedTokenizerFast", "NoSuchTokenizer", "Path", 3])
def test_a_class_whose_vocabulary_is_not_there_is_none(tmp_path, name):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    assert "no tokenizer" in {problem.found for problem in model_problems(str(tmp_path))}
    if name == "MyT5Tokenizer":
        (tmp_path / "byte_maps.json").write_text("{}")
        assert "no tokenizer" not in {problem.found for problem in model_problems(str(tmp_path))}


def test_a_directory_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError) as raised:
        load(tmp_path)
    (problem,) = raised.value.problems
    assert problem.path == "model.path"
    assert problem.found == f"the directory {tmp_path} without a tokenizer (it holds config.json)"


def test_a_damaged_tokenizer(directory):
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError) as raised:
        load(directory)
    (problem,) = raised.value.problems
    assert problem.path == "model.path"
    assert problem.found.startswith(f"the directory {directory} with a tokenizer that does not load (")


def test_what_transformers_finds_wrong_with_config_json_is_named(directory):
    config = {"model_type": "qwen2", "num_hidden_layers": 28, "layer_types": ["full_attention"]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as raised:
        load(directory)
    (problem,) = raised.value.problems
    assert "`num_hidden_layers` (28)" in problem.found
    assert "`layer_types` (1)" in problem.found


def test_a_tokenizer_with_code_of_its_own_is_refused_with_the_option_that_trusts_it(directory):
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError) as raised:
        load(directory)
    (problem,) = raised.value.problems
    assert problem.found == f"{directory} with a tokenizer whose code comes with the model"
    assert "model.trust_remote_code" in problem.remedy


def test_a_damaged_tokenizer_is_no_code_to_trust(directory):
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": {"AutoConfig": "own.Config"}}))
    (directory / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError) as raised:
        load(directory)
    assert "trust_remote_code" not in str(raised.value)


@pytest.mark.parametrize("kind", ["file", "nothing"])
def test_a_path_that_is_no_directory(tmp_path, kind):
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("")
    with pytest.raises(ModelError) as raised:
        load(path)
    (problem,) = raised.value.problems
    assert problem.path == "model.path"
    assert problem.found.startswith(f"the file {path}" if kind == "file" else f"{str(path)!r}, which is no directory here")


def test_without_transformers(tokenizer_directory, monkeypatch):
    real_import = builtins.__import__

    def without_transformers(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    with pytest.raises(ModelError) as raised:
        load(tokenizer_directory)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("model.path", "no usable `transformers` (No module named 'transformers')")
    assert "pip install 'rlcore[tokenizer]'" in problem.remedy


def test_loading_leaves_the_directory_as_it_was(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "copy")
    load(directory)
    assert sorted(entry.name for entry in directory.iterdir()) == sorted(entry.name for entry in (tmp_path / "copy").iterdir())


def test_another_process_reads_the_same_tokenizer(directory):
    """As each worker of a cluster, where the run is resumed too."""
    template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
    tokenizer = load(directory, chat_template=template, chat_template_kwargs={"loud": True})
    found = pickle.loads(pickle.dumps(tokenizer))
    assert found.decode(found.encode("two")) == "two"
    assert (found.stop_token_ids, found.prompt_prefix) == (tokenizer.stop_token_ids, tokenizer.prompt_prefix)
    assert found.render_chat([{"role": "user", "content": "two"}]) == "two!"
