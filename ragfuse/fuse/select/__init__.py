"""Selection policies, which choose the rows of cached chunks to recompute.

Settings choose a policy by the name of an entry in `POLICIES`.
"""

from ragfuse.fuse.select.lego import Lego
from ragfuse.fuse.select.lexical import Lexical, nearness
from ragfuse.fuse.select.policy import Candidates, Policy
from ragfuse.fuse.select.random import Random
from ragfuse.types.choices import COUNTED, no_policy
from ragfuse.types.plan import PolicyCost

__all__ = ["POLICIES", "Candidates", "Policy", "cost_of", "nearness", "policy_named"]

POLICIES = (
    Policy(name="full", fixed_share=1.0),
    Policy(name="none", fixed_share=0.0),
    Random(),
    Policy(name="hkvd", check_layer=1),  # CacheBlend 4.3
    Lego(),
    Lexical(),
    Policy(name="query", wants="attention"),
)


def cost_of(name: str) -> PolicyCost:
    """Return the cost of the policy called `name`."""
    return policy_named(name).cost


def policy_named(name: str) -> Policy:
    """Return the policy called `name`. `lego-32` recomputes the first 32 tokens of each chunk.

    Raises:
        SettingsError: No policy is called `name`.
    """
    for policy in POLICIES:
        if policy.name == name:
            return policy
    if counted := COUNTED.fullmatch(name):
        return Lego(name=name, first=int(counted[1]))
    raise no_policy(name)
