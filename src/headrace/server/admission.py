"""What every job meets before the engine does: its tenant's salt and limits, and what of its prompts is public."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.server.errors import ApiError
from headrace.server.job import Job, Prompt
from headrace.server.public import PublicPrefixes
from headrace.server.tenants import Tenant
from headrace.types import InvalidRequest


def admit(job: Job, tenant: Tenant, public: PublicPrefixes, context: int) -> None:
    """The job becomes the tenant's. A max_tokens that the client has left open, or that is all that the context allows,
    may be lowered: that is what a request without one has. context: the longest that the model takes.

    Raises InvalidRequest for a job that is larger than the tenant's may be, ApiError 429 where its tokens are used up.
    """
    _check_sizes(job, tenant, context)
    tenant.take(job.prompt_tokens)
    job.tenant, job.taken, job.admitted = tenant, job.prompt_tokens, True
    job.cache_salt = tenant.salt(job.cache_salt)
    if job.cache_salt is not None:
        note_public(job.prompts, public)


def note_public(prompts: Sequence[Prompt], public: PublicPrefixes) -> None:
    """How much of each prompt is the operator's."""
    for prompt in prompts:
        prompt.public_tokens = public.tokens(prompt.ids)


def settle(job: Job, refused: bool = False) -> None:
    """The job has ended; refused: before the engine took it."""
    prompt, cached = (0, 0) if refused else (job.prompt_tokens, job.cached_tokens)
    job.tenant.settle(job.taken, prompt, cached, job.output_tokens)
    job.taken = 0


def check_public(tokens: int, tenant: Tenant) -> None:
    """Raises ApiError where a client says that tokens are public, and may not."""
    if tokens and tenant.name and not tenant.rules.public_prefix_tokens:
        told = "public_prefix_tokens: this key may not make tokens public; leave it out"
        raise ApiError(400, told, "public_prefix_tokens", "unsupported_parameter")


def _check_sizes(job: Job, tenant: Tenant, context: int) -> None:
    rules = tenant.rules
    check_public(job.public_prefix_tokens, tenant)
    if rules.max_prompt_tokens is not None and job.prompt_tokens > rules.max_prompt_tokens:
        several = len(job.prompts) > 1
        asked = f"{job.prompt_tokens:,} tokens{' in all' if several else ''}"
        what = f"its {len(job.prompts):,} prompts have" if several else "the prompt has"
        told = f"{what} {asked}, and this key allows {rules.max_prompt_tokens:,}"
        raise InvalidRequest(told, None, "context_length_exceeded")
    if rules.max_output_tokens is not None:
        _bound_output(job, rules.max_output_tokens, context)


def _bound_output(job: Job, most: int, context: int) -> None:
    """most: tokens of all answers together."""
    answers = [choice for choice in job.choices if choice.prompt.params.max_tokens != 0]
    each = most // max(1, len(answers))
    for prompt in job.prompts:
        asked = prompt.params.max_tokens
        if asked is not None and asked <= each:
            continue
        left_open = prompt.left_open or asked is None or asked == context - len(prompt.ids)
        if left_open and each == 0:
            told = f"this key allows {most:,} tokens in all, and {len(answers)} answers are asked for; ask for fewer"
            raise InvalidRequest(f"n: {told}", "n")
        if left_open and each < prompt.params.min_tokens:
            raise InvalidRequest(f"min_tokens: this key allows {each:,}", "min_tokens")
        if not left_open and prompt.silent:
            told = f"this key allows {most:,} tokens of answers, and {len(answers)} texts take one each; give fewer"
            raise InvalidRequest(told, "max_tokens")
        if not left_open:
            of = f" for each of {len(answers)} answers" if len(answers) > 1 else ""
            raise InvalidRequest(f"max_tokens: this key allows {each:,}{of}", "max_tokens")
        prompt.params = replace(prompt.params, max_tokens=each)
