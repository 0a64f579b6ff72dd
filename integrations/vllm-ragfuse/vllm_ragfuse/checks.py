"""Checks of vLLM's configuration, made once when vLLM starts, before the first request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import vllm
from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel, StrictBool
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from ragfuse import Settings, SettingsError
from ragfuse.transfer import UNKNOWN, TransferError, TransferModel, TransferPlace, sample_weights
from ragfuse.types.arguments import checks_arguments

TESTED = ("0.32",)
"""The vLLM versions (major.minor) with which this connector is tested."""


@checks_arguments
class Options(BaseModel, extra="forbid"):
    """The options that vLLM's `kv_connector_extra_config` may contain."""

    transfer_url: str | None = None
    model: str | None = None
    salt: str | None = None
    load: Literal["async", "sync"] = "async"
    other_weights: StrictBool = False
    untested_vllm: StrictBool = False


@dataclass(frozen=True)
class Setup:
    """The connector's configuration, after all checks.

    Args:
        model: The model with which this vLLM engine decodes.
        block_size: Number of tokens per block of vLLM's cache.
        is_async: True if KV is loaded between steps, while other requests continue.
        salt: Salt of the only tenant whose KV is accepted. None means any tenant.
        settings: Settings of the transfer place, where ragfuse puts KV.
        weights: Digest of this engine's weights. KV computed with other weights is rejected. If
            "unknown", weights are not compared.
    """

    model: TransferModel
    block_size: int
    is_async: bool
    salt: str | None
    settings: Settings
    weights: str = UNKNOWN

    @classmethod
    def of(cls, config: VllmConfig, caches: KVCacheConfig) -> Self:
        """Check vLLM's configuration, and return the connector's configuration.

        Raises:
            SettingsError: KV cannot be transferred with this configuration. The message says what
                to change.
        """
        transfer = config.kv_transfer_config
        options = Options(**transfer.kv_connector_extra_config)
        check_version(vllm.__version__, options.untested_vllm)
        check_roles(transfer.kv_role, transfer.kv_load_failure_policy)
        check_parallel(config)
        url = options.transfer_url
        return cls(
            model_of(config, options.model),
            check_groups(config, caches),
            options.load == "async",
            options.salt,
            Settings(transfer_url=url) if url else Settings(),
            UNKNOWN if options.other_weights else weights_of(config),
        )

    def place(self) -> TransferPlace:
        """Open the transfer place (a folder, Redis or a bucket), where ragfuse puts KV.

        Raises:
            SettingsError: No transfer place is configured, or the transfer place cannot be opened.
        """
        try:
            return TransferPlace.open(self.settings)
        except TransferError as error:
            raise SettingsError(
                f"{error} In vLLM, set transfer_url in kv_connector_extra_config, or"
                " RAGFUSE_TRANSFER_URL."
            ) from error


def check_version(found: str, untested: bool) -> None:
    """Raise SettingsError if vLLM's version is not in `TESTED`, unless `untested` is True."""
    if not untested and not any(
        found == version or found.startswith(f"{version}.") for version in TESTED
    ):
        raise SettingsError(
            f"vllm-ragfuse was tested with vLLM {' or '.join(TESTED)}, but found {found}. Install"
            ' a tested version; or set "untested_vllm": true in kv_connector_extra_config, and'
            " compare answers with and without ragfuse first."
        )


def check_roles(role: str | None, policy: str) -> None:
    """Raise SettingsError unless vLLM receives KV (`role`) and recomputes missing KV (`policy`)."""
    if role != "kv_consumer":
        raise SettingsError(
            f"vLLM must only decode for ragfuse, but kv_role is {role!r}. Set kv_role to"
            " 'kv_consumer'."
        )
    if policy != "recompute":
        raise SettingsError(
            f"kv_load_failure_policy is {policy!r}, so vLLM would not compute missing KV. Set"
            " kv_load_failure_policy to 'recompute'."
        )


def check_parallel(config: VllmConfig) -> None:
    """Raise SettingsError for untested kinds of model or cache parallelism."""
    parallel = config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            raise SettingsError(
                f"vLLM's {name} must be 1, found {getattr(parallel, name)}. Use"
                " tensor_parallel_size instead."
            )


def check_groups(config: VllmConfig, caches: KVCacheConfig) -> int:
    """Return the number of tokens per block of vLLM's cache.

    Raises:
        SettingsError: A layer does not cache the KV of all tokens, or the cache has an unsupported
            dtype or block size.
    """
    groups = caches.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if (
        len(groups) != 1
        or type(specs[0]) is not FullAttentionSpec
        or specs[0].sliding_window is not None
    ):
        found = ", ".join(type(spec).__name__ for spec in specs) or "none"
        raise SettingsError(
            "vLLM can load ragfuse's KV only if all layers keep keys and values of all tokens, but"
            f" found {found}. Use `ragfuse serve` for models that have sliding windows, latent"
            " attention or recurrent states."
        )
    model, cache = config.model_config, config.cache_config
    n_layers = model.get_total_num_hidden_layers()
    if len(groups[0].layer_names) != n_layers:
        raise SettingsError(
            f"The KV connector needs KV in each of the model's {n_layers} layers, but vLLM"
            f" registered KV for {len(groups[0].layer_names)} layers. Turn off draft models"
            " (speculative decoding). Models whose layers share KV are not supported."
        )
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise SettingsError(
            "The KV cache must have the model's dtype, but kv_cache_dtype is"
            f" {cache.cache_dtype!r}. Set kv_cache_dtype to 'auto'."
        )
    if specs[0].block_size != cache.block_size:
        raise SettingsError(
            f"The block size is {cache.block_size} tokens in the configuration, but"
            f" {specs[0].block_size} in the cache. Do not set block_size."
        )
    return int(specs[0].block_size)


def model_of(config: VllmConfig, name: str | None) -> TransferModel:
    """Return a description of this engine's model. `name` defaults to the path's last part."""
    model = config.model_config
    return TransferModel(
        name or Path(model.model).name,
        model.get_total_num_hidden_layers(),
        model.get_total_num_kv_heads(),
        model.get_head_size(),
        str(model.dtype).removeprefix("torch."),
    )


def weights_of(config: VllmConfig) -> str:
    """Return the digest of local, unquantised safetensors files; "unknown" without such files."""
    model, loads = config.model_config, config.load_config
    if loads.load_format not in ("auto", "safetensors") or model.quantization is not None:
        return UNKNOWN
    if Path(model.model).is_dir():
        return sample_weights(Path(model.model))
    found = try_to_load_from_cache(
        model.model, "config.json", cache_dir=loads.download_dir, revision=model.revision
    )
    return sample_weights(Path(found).parent) if isinstance(found, str) else UNKNOWN
