"""The model store: known models, fetched once, checked and cached."""

from services.bootstrap.store.errors import ModelStoreError
from services.bootstrap.store.known import KNOWN_MODELS, KnownModel
from services.bootstrap.store.store import ModelStore, default_model_dir, known_model

__all__ = ["KNOWN_MODELS", "KnownModel", "ModelStore", "ModelStoreError", "default_model_dir", "known_model"]
