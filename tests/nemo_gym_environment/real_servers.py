"""The same task on NeMo Gym's own servers; a program for an interpreter that has nemo-gym 0.4. It is given the address of the
policy, and prints that of the head server."""

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig, ModelServerRef, ResourcesServerRef
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, HeadServer, ServerClient, set_global_aiohttp_client
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig
from responses_api_models.openai_model.app import SimpleModelServer, SimpleModelServerConfig

AGENT = "double_simple_agent"


class DoubleRequest(BaseModel):
    n: int


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")
    expected: str


class VerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class DoubleServer(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/double")(self.double)
        return app

    async def double(self, request: Request, body: DoubleRequest) -> dict[str, int]:
        request.session["called"] = request.session.get("called", 0) + 1
        return {"doubled": 2 * body.n}

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        messages = [item for item in body.response.output if item.type == "message"]
        is_right = bool(messages) and body.expected in messages[-1].content[0].text
        figures = {"called": request.session.get("called", 0), "is_right": is_right}
        return VerifyResponse(**body.model_dump(), reward=float(is_right), **figures)


async def main(policy_url: str) -> None:
    kinds = {
        AGENT: "responses_api_agents",
        "policy_model": "responses_api_models",
        "double": "resources_servers",
    }
    listeners = {name: socket.create_server(("127.0.0.1", 0)) for name in (*kinds, "head_server")}
    places = {name: {"host": "127.0.0.1", "port": one.getsockname()[1]} for name, one in listeners.items()}
    config = {name: {kind: {"server": places[name] | {"entrypoint": "app.py"}}} for name, kind in kinds.items()}
    client = ServerClient(
        head_server_config=BaseServerConfig(**places["head_server"]),
        global_config_dict=OmegaConf.create(config | {"head_server": places["head_server"]}),
    )

    def own(name: str) -> dict[str, Any]:
        return places[name] | {"entrypoint": "app.py", "name": name, "domain": "other"}

    model = SimpleModelServerConfig(
        **own("policy_model"), openai_base_url=policy_url, openai_api_key="none", openai_model="policy"
    )
    agent = SimpleAgentConfig(
        **own(AGENT),
        resources_server=ResourcesServerRef(type="resources_servers", name="double"),
        model_server=ModelServerRef(type="responses_api_models", name="policy_model"),
    )
    servers = {
        AGENT: SimpleAgent(config=agent, server_client=client),
        "policy_model": SimpleModelServer(config=model, server_client=client),
        "double": DoubleServer(config=BaseResourcesServerConfig(**own("double")), server_client=client),
    }
    apps = {name: server.setup_webserver() for name, server in servers.items()}
    for name, app in apps.items():
        servers[name].setup_exception_middleware(app)
    head = HeadServer(config=BaseServerConfig(**places["head_server"]))
    head.set_server_instances(
        [
            {"process_name": name, "server_type": kind, "url": "http://{host}:{port}".format(**places[name])}
            for name, kind in kinds.items()
        ]
    )
    apps["head_server"] = head.setup_webserver()
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())  # all servers share this event loop's
    print("http://{host}:{port}".format(**places["head_server"]), flush=True)
    running = [uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([listeners[name]]) for name, app in apps.items()]
    await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
