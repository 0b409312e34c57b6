"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .export import export_policy as export_policy
from .hub import from_pretrained as from_pretrained
from .hub import push_to_hub as push_to_hub
from .hub import save_pretrained as save_pretrained
from .loading import LoadedPolicy as LoadedPolicy
from .loading import load_policy as load_policy
