"""What OpenGyre adds to each worker of vLLM (`--worker-extension-cls`). Runs in vLLM's own environment."""

from typing import Any

import torch


class Extension:
    """Mixed into vLLM's worker: `model_runner` and `reload_weights` are the worker's."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def gyre_load(self, directory: str) -> int:
        """Take the weights of a Hugging Face directory; returns how many output heads were packed again.

        On a CPU each linear layer holds its weights once more, packed for oneDNN. A reload packs them again, but not an
        output head that is tied to the embedding: it would go on with the old ones, and no checksum of parameters shows
        it.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=directory)
        packed = 0
        if next(self.model_runner.model.parameters()).device.type == "cpu":
            for module in self.model_runner.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
                    packed += 1
        return packed

    def gyre_sampler(self) -> dict[str, Any]:
        """What is in force of all that moves log-probs, whatever arguments led to it."""
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        dtype = str(model.dtype).removeprefix("torch.")
        return {
            "processors": [str(one) for one in model.logits_processors or ()],
            "logprobs": model.logprobs_mode.removesuffix("_logprobs"),
            "dtype": dtype,
            "kv_dtype": dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
            "quantization": model.quantization,
            "chunked_prefill": bool(self.vllm_config.scheduler_config.enable_chunked_prefill),
            "prefix_caching": bool(cache.enable_prefix_caching),
        }

    def gyre_memory(self) -> dict[str, int]:
        """Bytes of its accelerator that the worker holds for weights, keys and values; zero on a CPU.

        They are in the pool of vLLM's sleep mode. torch counts what it gave out of that as allocated also when it
        sleeps and the memory behind it is given back.
        """
        if not torch.cuda.is_available():
            return {"allocated": 0}
        from vllm.device_allocator.cumem import CuMemAllocator

        pool = CuMemAllocator.get_instance().pointer_to_data.values()
        return {"allocated": sum(one.handle[1] for one in pool if not one.is_asleep)}
