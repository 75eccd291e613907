# SPDX-License-Identifier: Apache-2.0
"""What each head may keep: profiles, budgets, head groups and eviction schedules."""

from vllm_tangram.budget.allocation import BudgetCurve
from vllm_tangram.budget.fingerprint import check_same_model, model_fingerprint
from vllm_tangram.budget.grouping import HeadGroups, group_members
from vllm_tangram.budget.plan import RetentionPlan
from vllm_tangram.budget.profile import FORMAT_VERSION, RetentionProfile
from vllm_tangram.budget.schedule import EvictionSchedule, build_schedule
from vllm_tangram.budget.sharding import Sharding

__all__ = [
    "FORMAT_VERSION",
    "BudgetCurve",
    "EvictionSchedule",
    "HeadGroups",
    "RetentionPlan",
    "RetentionProfile",
    "Sharding",
    "build_schedule",
    "check_same_model",
    "group_members",
    "model_fingerprint",
]
