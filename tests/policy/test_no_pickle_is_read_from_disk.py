"""No code reads a pickle from a file: unpickling runs code, and a checkpoint may come from someone else."""

import ast
import re

import pytest

UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
BETWEEN_PROCESSES = {
    "core/src/rlcore/run/execution/context.py": "options, from the driver to its workers",
    "plugins/ray_execution/src/rlcore_ray/collector_actor.py": "what builds a collector, from the driver",
    "plugins/rollout/src/rlcore_rollout/collector_messages.py": "errors, from a collector to the driver",
    "plugins/ray_execution/src/rlcore_ray/failures.py": "errors, from a worker to its driver",
    "plugins/ray_execution/src/rlcore_ray/worker.py": "the tokenizer, from the driver",
    "plugins/workers/src/rlcore_workers/process.py": "requests and answers, by a pipe",
    "torchkit/src/rlcore_torchkit/channels/cuda_ipc.py": "handles of memory, from a trainer's rank",
    "plugins/workers/src/rlcore_workers/hosted.py": "what an engine begins with, by its standard input",
    "plugins/vllm_generation/src/rlcore_vllm/engines/versions.py": "vLLM's own messages between its processes",
}
"""Files that unpickle messages between processes of the same run."""
COMPARED = {
    "plugins/conformance/src/rlcore_conformance/algorithms/algorithm_batches.py": "whether something was changed",
    "plugins/conformance/src/rlcore_conformance/environment.py": "whether something was changed",
    "plugins/conformance/src/rlcore_conformance/environments/environment_fixtures.py": "whether something was changed",
}
"""Files that compare pickled bytes, or unpickle bytes that they pickled themselves."""
ONLY_RECORDS = {
    "plugins/megatron_backend/src/rlcore_megatron/checkpoints/checkpoint_check.py": "torch's index of a distributed checkpoint",
}
"""Files that read a foreign format which is a pickle, by an Unpickler whose `find_class` admits named records alone."""
WORDS = re.compile("|".join(UNPICKLERS) + r"|\.load\(|yaml|read_pickle|load_extension|from_pretrained")
"""Words of which every file that the rules concern has at least one."""
FILES = ("open", "read_bytes", "read", "rb", "BytesIO")


@pytest.fixture(scope="module")
def trees(root, core_files, torchkit_files, plugin_files):
    others = [path for folder in ("benchmarks", "release", "demo", "recipes") for path in (root / folder).rglob("*.py")]
    files = sorted({*core_files, *torchkit_files, *plugin_files, *others})
    assert len(files) > 500
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in files}
    return {name: ast.parse(text) for name, text in texts.items() if WORDS.search(text)}


def test_pickles_are_read_only_where_they_are_listed(trees):
    found = {name for name, tree in trees.items() if imported(tree) & UNPICKLERS}
    assert found == {*BETWEEN_PROCESSES, *COMPARED, *ONLY_RECORDS}


def test_pickles_between_processes_come_from_no_file(trees):
    for name in (*BETWEEN_PROCESSES, *COMPARED):
        for call in calls(trees[name]):
            text = ast.unparse(call)
            if text.startswith(("pickle.load(", "pickle.Unpickler(")):
                assert text == "pickle.load(sys.stdin.buffer)", f"{name}: {text}"
            elif text.startswith(("pickle.loads(", "cloudpickle.loads(")):
                assert not any(word in text for word in FILES), f"{name}: {text}"


def test_unpicklers_of_others_formats_admit_records_alone(trees):
    for name in ONLY_RECORDS:
        classes = [node for node in ast.walk(trees[name]) if isinstance(node, ast.ClassDef)]
        (unpickler,) = [one for one in classes if any(ast.unparse(base) == "pickle.Unpickler" for base in one.bases)]
        assert [one.name for one in unpickler.body if isinstance(one, ast.FunctionDef)] == ["find_class"]
        assert not [
            ast.unparse(call) for call in calls(trees[name]) if ast.unparse(call.func) in ("pickle.load", "pickle.loads")
        ]


def test_libraries_read_no_pickle(trees):
    """Calls of torch, numpy, yaml, pandas and transformers forbid pickles."""
    found = [
        f"{name}:{call.lineno}: {ast.unparse(call)}"
        for name, tree in trees.items()
        for call in calls(tree)
        if runs_what_it_reads(ast.unparse(call.func), {one.arg: ast.unparse(one.value) for one in call.keywords}, call)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "AutoModelForCausalLM.from_pretrained(path)",
    ],
)
def test_a_read_that_runs_what_it_reads_is_found(text):
    (call,) = calls(ast.parse(text))
    assert runs_what_it_reads(ast.unparse(call.func), {one.arg: ast.unparse(one.value) for one in call.keywords}, call)


def runs_what_it_reads(function, options, call):
    owner, _, name = function.rpartition(".")
    if name == "load" and owner == "torch":
        return options.get("weights_only") != "True"
    if name == "load" and owner in ("np", "numpy"):
        return options.get("allow_pickle") != "False"
    if owner == "yaml" and name.endswith(("load", "load_all")) and not name.startswith("safe"):
        return name != "load" or [ast.unparse(one) for one in call.args[1:]] not in (["_Loader"], ["yaml.SafeLoader"])
    if name == "from_pretrained" and owner.startswith("AutoModel"):
        return options.get("use_safetensors") != "True" and "gguf_file" not in options
    return name in ("read_pickle", "load_extension")


def imported(tree):
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {module.partition(".")[0] for module in modules}


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
