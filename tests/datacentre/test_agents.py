"""Agents on another host than the driver, and a model server, are reached over the network by those with a key."""

import json
from pathlib import Path

import pytest

from rlcore_torchkit.testing.models import make_model

from .hosts import DataCentre, Host
from .runs import assert_same_metrics, trained

pytestmark = pytest.mark.wide
RECIPE = """
[run]
num_steps = 2
device = "cpu"
[model]
path = "{model}"
dtype = "float32"
[algorithm]
name = "grpo"
[trainer]
name = "fsdp2"
[generator]
name = "transformers"
[environment]
name = "agent"
[environment.agent]
command = ["python", "{folder}/ask.py", "{folder}/agents"]
max_concurrent = 4
[data.train]
source = "jsonl"
path = "{folder}/data.jsonl"
[rollout]
samples_per_prompt = 4
max_prompt_tokens = 100
max_response_tokens = 8
[training]
prompts_per_step = 2
[optimizer]
learning_rate = 1e-2
[evaluation]
at_start = false
at_end = false
[sinks]
names = []
"""
ASK = '''
"""Hands the task and its session to the agents' host, whose address is in a file, and prints what that answers."""
import json, os, socket, sys
from pathlib import Path
session = {name: os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")}
with socket.create_connection((Path(sys.argv[1]).read_text(), 9100)) as link:
    link.sendall(json.dumps({"session": session, "task": json.load(sys.stdin)}).encode())
    link.shutdown(socket.SHUT_WR)
    print(link.makefile().read())
'''
AGENTS = '''
"""Runs agents: each asks the policy once with its key, and once with another, which has to be refused."""
import json, socketserver, sys, urllib.error, urllib.request

def ask(base_url, key, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

class Agent(socketserver.StreamRequestHandler):
    def handle(self):
        order = json.loads(self.rfile.read())
        session, prompt = order["session"], order["task"]["prompt"]
        body = {"model": session["OPENAI_MODEL"], "messages": [{"role": "user", "content": prompt}]}
        answer = ask(session["OPENAI_BASE_URL"], session["OPENAI_API_KEY"], body)["choices"][0]["message"]["content"]
        origin = session["OPENAI_BASE_URL"].split("/")[2]
        try:
            ask(f"http://{origin}/v1", "0" * 32, body)
            refused = 0
        except urllib.error.HTTPError as error:
            refused = int(error.code == 401)
        self.wfile.write(json.dumps({"reward": len(set(answer)) / 8, "refused": refused}).encode())

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True

with Server((sys.argv[1], 9100), Agent) as server:
    server.serve_forever()
'''


@pytest.fixture
def agents_shared(shared: Path) -> Path:
    """The shared folder with a recipe of agents."""
    model = make_model(shared / "chatty")
    (shared / "agents.toml").write_text(RECIPE.format(model=model, folder=shared))
    (shared / "ask.py").write_text(ASK)
    (shared / "serve_agents.py").write_text(AGENTS)
    rows = [{"prompt": f"say {word}"} for word in ("a", "b", "c", "d")]
    (shared / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return shared


def serve_agents(host: Host) -> None:
    """Start the agents' service, and have the programs of episodes find it."""
    host.popen(["python", "serve_agents.py", host.address])
    host.check(["sh", "-c", "until ss -ltn | grep -q :9100; do sleep 0.1; done"])
    (host.shared / "agents").write_text(host.address)


@pytest.mark.usefixtures("agents_shared")
def test_agents_of_another_host_train_as_those_of_the_drivers(centre: DataCentre) -> None:
    one, other = centre.hosts.values()
    serve_agents(one)
    here = trained(one, "agents-here", recipe="agents.toml")
    serve_agents(other)
    there = trained(one, "agents-there", recipe="agents.toml", RLCORE_SESSION_HOST=one.address)
    assert_same_metrics(there, here)
    last = json.loads((there / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["environment/refused"] == 1.0


CHAT = """
import json, sys, urllib.error, urllib.request
body = {"model": "served", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
for key in sys.argv[2:]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(sys.argv[1], json.dumps(body).encode(), headers)) as answer:
            print(answer.status, json.load(answer)["usage"]["completion_tokens"] > 0)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


@pytest.mark.usefixtures("agents_shared")
def test_a_model_is_served_to_other_hosts_with_its_key_alone(centre: DataCentre) -> None:
    one, other = centre.hosts.values()
    command = ["rlcore", "serve", "chatty", "--name", "served", "--host", one.address, "--port", "8100"]
    one.popen([*command, "--generator", "transformers", "run.device=cpu"], RLCORE_API_KEY="right")
    one.check(["sh", "-c", "until ss -ltn | grep -q :8100; do sleep 0.2; done"])
    url = f"http://{one.address}:8100/v1/chat/completions"
    assert other.check(["python", "-c", CHAT, url, "right", "wrong"]).split() == ["200", "True", "401"]
    one.end_processes()
