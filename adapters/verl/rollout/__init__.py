"""The processes of verl's rollout servers, vLLM's and SGLang's."""
