# SPDX-License-Identifier: Apache-2.0
"""What each head may keep: profiles, budgets, head groups and eviction schedules."""

from vllm_tangram.budget.allocation import BudgetCurve
from vllm_tangram.budget.fingerprint import check_same_model, model_fingerprint
from vllm_tangram.budget.grouping import HeadGroups, group_members
from vllm_tangram.budget.plan import RetentionPlan
from vllm_tangram.budget.profile import FORMAT_VERSION, PROFILE_RETENTIONS, RetentionProfile
from vllm_tangram.budget.schedule import EvictionSchedule, build_schedule
from vllm_tangram.budget.stability import Clipping, Stability, clipping, rank_stability

__all__ = [
    "FORMAT_VERSION",
    "PROFILE_RETENTIONS",
    "BudgetCurve",
    "Clipping",
    "EvictionSchedule",
    "HeadGroups",
    "RetentionPlan",
    "RetentionProfile",
    "Stability",
    "build_schedule",
    "check_same_model",
    "clipping",
    "group_members",
    "model_fingerprint",
    "rank_stability",
]
