"""x."""
from rlcore_bundles.peers.contract import Peer, Setup
INSTALL=""
def peer(setup: Setup) -> Peer:
    raise NotImplementedError
