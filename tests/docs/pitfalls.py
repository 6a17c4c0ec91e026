"""``python -m tests.docs.pitfalls`` writes dev/pitfalls.md: known mistakes and the tests for each."""

from __future__ import annotations

from tests.docs.blocks import ROOT

PAGE = ROOT / "dev" / "pitfalls.md"
HEAD = """\
# Pitfalls

This page lists mistakes that released alignment libraries have made, with links to the tests that detect the same mistake in Valence.
"""

PITFALLS: dict[str, dict[str, tuple[str, ...]]] = {
    "The reference point of KTO": {
        "Averaging the means of processes, or dividing a local mean by the number of "
        "processes, instead of dividing the sum over all processes by the count over all "
        "processes": (
            "tests/training/test_pitfalls.py::"
            "test_the_reference_point_divides_the_sum_of_all_by_the_count_of_all",
            "tests/training/test_pitfalls.py::"
            "test_counts_and_the_reference_point_are_those_of_all_processes",
        ),
        "Clamping the estimate of each process to zero before summing over processes, which "
        "biases the sum upward": (
            "tests/training/test_pitfalls.py::"
            "test_the_reference_point_is_clamped_once_after_the_sum",
        ),
        "One estimate per micro-batch, so that the micro-batch size changes the gradient": (
            "tests/contract/test_contract.py::"
            "test_loss_gradient_and_numbers_do_not_depend_on_micro_batches_or_order",
        ),
        "Pairing a prompt with its own completion. This can happen if a step has only one row, if "
        "an odd number of rows is paired in reverse order, if two rows have the same text, or at "
        "the end of the data": (
            "tests/batching/test_kl_pairs.py::test_the_partner_is_the_next_one_cyclically",
            "tests/batching/test_kl_pairs.py::"
            "test_a_step_of_one_takes_its_partner_from_the_following_examples",
            "tests/batching/test_kl_pairs.py::test_the_short_tail_of_an_epoch_finds_partners",
            "tests/batching/test_kl_pairs.py::test_two_rows_with_the_same_text_are_never_partners",
            "tests/batching/test_kl_pairs.py::"
            "test_every_prompt_gets_a_completion_of_another_prompt",
        ),
        "Choosing the KL pairs once, when the data is prepared, so that rows cannot be shuffled or "
        "read by several workers": (
            "tests/batching/test_kl_pairs.py::test_partners_change_from_epoch_to_epoch",
            "tests/data/test_sampler.py::test_seed_and_epoch_each_change_the_order",
        ),
        "Keeping the autograd graph of rows that need no gradient": (
            "tests/training/test_pitfalls.py::test_mismatched_rows_run_without_a_graph",
            "tests/contract/test_contract.py::test_measuring_sequences_get_no_gradient",
        ),
        "Including prompt tokens in the log-probabilities": (
            "tests/contract/test_contract.py::test_a_token_of_the_prompt_is_context_only",
            "tests/contract/test_contract.py::"
            "test_prompts_get_no_gradient_and_answers_the_declared_direction",
        ),
        "Truncating a long mismatched completion to zero tokens": (
            "tests/batching/test_kl_pairs.py::test_truncation_keeps_at_least_one_token",
        ),
        "Truncating a long mismatched completion in place, so that the row it belongs to stays "
        "truncated": (
            "tests/batching/test_kl_pairs.py::"
            "test_if_none_fits_the_next_is_cut_on_the_right_and_not_for_good",
            "tests/training/test_pitfalls.py::test_a_pass_over_rows_leaves_them_as_they_were",
        ),
        "A second implementation of the loss that ignores the class weights, or that ignores the "
        "reference when an adapter is trained": (
            "tests/training/test_pitfalls.py::"
            "test_class_weights_and_the_reference_are_the_same_under_an_adapter",
            "tests/golden/test_unpaired.py::test_value_and_gradient",
        ),
    },
    "Averages": {
        "Averaging over the tokens of each micro-batch and then over micro-batches, or not "
        "dividing by the number of micro-batches": (
            "tests/contract/test_contract.py::"
            "test_loss_gradient_and_numbers_do_not_depend_on_micro_batches_or_order",
            "tests/golden/test_whole_step.py::test_a_whole_step_from_logits_to_the_number",
        ),
        "Averaging per process when processes have different counts": (
            "tests/training/test_pitfalls.py::"
            "test_counts_and_the_reference_point_are_those_of_all_processes",
            "tests/reports/test_metrics.py::test_processes_are_pooled_by_count",
        ),
        "Logging the metric of a class without rows as 0, which lowers the curve, or as NaN, which "
        "makes the mean of the evaluation NaN": (
            "tests/contract/test_contract.py::test_an_absent_class_is_left_out_and_never_zero",
            "tests/reports/test_metrics.py::test_a_mean_without_values_is_omitted",
        ),
        "A mean that skips NaN values, and so hides a real NaN": (
            "tests/reports/test_metrics.py::test_a_number_that_is_not_finite_is_seen",
            "tests/training/test_run.py::"
            "test_a_step_that_is_not_finite_changes_nothing_and_names_its_rows",
        ),
        "Gathering values from all processes and splitting them by the labels of one process": (
            "tests/reports/test_metrics.py::test_columns_of_processes_are_ranked_together",
        ),
        "Inferring masks or lengths from non-zero values, which fails at the first step, when"
        " policy and reference are equal": (
            "tests/training/test_pitfalls.py::"
            "test_lengths_are_counted_from_the_mask_and_not_from_values",
            "tests/contract/test_contract.py::test_finite_and_exact_when_policy_equals_reference",
        ),
        "Broadcasting one value per row against a matrix of tokens by mistake": (
            "tests/training/test_pitfalls.py::"
            "test_views_hold_one_number_per_sequence_pair_or_token",
        ),
        "Row weights that are divided by the number of tokens": (
            "tests/training/test_pitfalls.py::test_a_row_counts_as_one_however_long_it_is",
            "tests/contract/test_contract.py::test_a_weight_multiplies_and_never_divides",
        ),
    },
    "Data": {
        "Turning pairs into a block of chosen and a block of rejected completions without "
        "shuffling": (
            "tests/data/test_pitfalls.py::"
            "test_pairs_that_became_judgements_are_mixed_in_every_step",
            "tests/data/test_load.py::test_pairs_to_judgements_keeps_both_sides_next_to_each_other",
            "tests/data/test_sampler.py::test_a_block_of_each_class_is_mixed",
        ),
        "Treating an unknown label as rejected, or as true because its text is not empty": (
            "tests/data/test_formats.py::test_a_label_is_one_of_the_words_or_an_error",
            "tests/data/test_formats.py::test_everything_else_is_no_label",
            "tests/data/test_pitfalls.py::test_no_word_is_a_thumbs_up_because_it_is_not_empty",
        ),
        "Assuming that the tokens of the prompt are a prefix of the tokens of the conversation. The "
        "template can render the prompt differently, and tokens can merge where the completion "
        "starts": (
            "tests/data/test_encode_rows.py::"
            "test_prompt_that_renders_differently_once_answered_is_trained_on_as_it_is_sampled",
            "tests/data/test_encode_template.py::"
            "test_text_merging_over_the_boundary_is_noted_and_kept_apart",
            "tests/data/test_encode_rows.py::test_training_and_sampling_encode_the_same_tokens",
        ),
        "Training on plain-text prompts without the chat template that sampling and the model "
        "card use": (
            "tests/training/test_chat_template.py::"
            "test_training_sampling_scoring_and_the_card_agree_on_plain_text",
        ),
        "Training on text that the chat template inserts before a completion (empty "
        "reasoning, channel headers)": (
            "tests/data/test_real_templates.py::"
            "test_the_mask_is_the_completion_and_the_end_of_the_turn",
            "tests/data/test_real_templates.py::"
            "test_training_continues_the_prompt_that_is_sampled_from",
        ),
        "Training on earlier turns as the template rewrites them, not as the model generates "
        "them": ("tests/data/test_real_templates.py::test_every_assistant_turn_can_be_trained_on",),
        "Ignoring end tokens of the generation config in sampling and training": (
            "tests/training/test_chat_template.py::test_every_end_token_is_used_everywhere",
            "tests/training/test_chat_template.py::"
            "test_an_answer_that_ends_at_any_of_them_is_finished",
        ),
        "Two beginning-of-sequence tokens": (
            "tests/data/test_encode_template.py::"
            "test_one_bos_when_both_template_and_tokenizer_have_it",
            "tests/data/test_encode_template.py::test_double_bos_that_a_row_brings_along_is_noted",
        ),
        "Leaving the end-of-turn token out of the loss mask, so that the model never learns "
        "to stop": (
            "tests/data/test_encode_rows.py::test_answers_end_where_the_template_ends_a_turn",
            "tests/data/test_audit.py::test_ends_of_turns",
        ),
        "Adding an end-of-turn token to a truncated completion": (
            "tests/data/test_encode_long.py::"
            "test_cut_completion_takes_the_end_and_adds_no_end_of_turn",
        ),
        "An attention mask `ids != pad`, which hides every end-of-sequence token if it is also the "
        "padding token": (
            "tests/data/test_pitfalls.py::test_end_of_sequence_in_the_context_is_seen",
            "tests/rollouts/test_hf.py::test_the_padding_token_has_no_influence",
        ),
        "Truncation that removes the last user turn": (
            "tests/data/test_encode_long.py::"
            "test_cut_prompt_takes_oldest_turns_and_keeps_system_and_last_user_turn",
        ),
        "Truncation that removes the whole completion": (
            "tests/data/test_encode_long.py::test_cut_completion_never_leaves_an_empty_answer",
        ),
        "Rows that disappear without being counted, and truncated rows that stay in the loss": (
            "tests/data/test_pitfalls.py::"
            "test_no_stub_of_a_long_row_is_left_and_none_vanishes_uncounted",
            "tests/data/test_audit.py::test_rows_not_used_with_reason_and_place",
            "tests/data/test_encode_long.py::test_drop_omits_long_rows_with_a_note",
        ),
        'One handler for all errors that reports them as "could not load"': (
            "tests/data/test_malformed.py::test_a_mistake_is_reported_once_with_its_place_and_fix",
            "tests/arch/test_budgets.py::test_no_handler_takes_every_error",
        ),
        "Losing the labels of the second of two files that share prompt ids": (
            "tests/data/test_load.py::test_two_files_that_share_a_prompt_are_both_kept",
        ),
        "Computing the warm-up from a wrong number of steps": (
            "tests/training/test_pitfalls.py::test_warm_up_and_decay_follow_the_steps_of_the_run",
            "tests/training/test_optim.py::"
            "test_warm_up_is_a_share_of_all_steps_or_a_number_of_steps",
        ),
        "Making no step if the data is smaller than a batch, and saving a final model anyway": (
            "tests/training/test_pitfalls.py::test_data_smaller_than_a_batch_is_trained_on",
            "tests/training/test_run.py::test_mistakes_are_found_before_a_model_is_loaded",
        ),
        "Evaluating on training data, leaving out the last rows, or never finishing on a small set": (
            "tests/training/test_pitfalls.py::"
            "test_evaluation_measures_every_held_out_row_once_and_no_other",
            "tests/training/test_run.py::test_a_run_writes_what_each_held_out_row_measured",
            "tests/training/test_pitfalls.py::test_evaluating_changes_nothing",
        ),
        "Using the trained policy as the reference in evaluation, or loading an adapter to train "
        "with its weights frozen": (
            "tests/training/test_pitfalls.py::test_the_reference_stays_where_the_policy_started",
            "tests/training/test_run.py::test_one_continues_an_adapter_against_a_copy_of_it",
        ),
    },
    "Several processes": {
        "Waiting forever for a process that has no rows": (
            "tests/distributed/test_fsdp.py::test_two_steps_of_several_processes_are_those_of_one",
            "tests/distributed/test_run.py::test_every_number_is_that_of_one_process",
        ),
        "Letting one process skip a step, stop, or retry with less memory while the others do not": (
            "tests/distributed/test_fsdp.py::"
            "test_all_processes_give_up_a_step_when_one_has_no_memory_left",
            "tests/distributed/test_run.py::"
            "test_a_signal_to_one_process_stops_all_and_any_number_resumes",
        ),
        "Not summing gradients over processes, because the model is called directly and not through "
        "its distributed wrapper": (
            "tests/distributed/test_fsdp.py::test_two_steps_of_several_processes_are_those_of_one",
        ),
        "A cache on one process only, so that some processes compute and others do not": (
            "tests/distributed/test_fsdp.py::test_processes_agree_whether_a_reference_is_computed",
        ),
        "A lost connection that makes a run hang forever": (
            "tests/distributed/test_hosts.py::"
            "test_a_broken_link_ends_both_hosts_and_the_same_command_resumes",
        ),
    },
    "Resume": {
        "Silently not restoring optimizer state, random state or logged totals": (
            "tests/training/test_state.py::test_state_that_changes_in_training_is_saved",
            "tests/training/test_state.py::test_state_that_is_not_saved_is_found",
            "tests/training/test_state.py::test_every_random_generator_resumes_at_its_state",
        ),
        "Saving only the first process's part of weights and optimizer state": (
            "tests/distributed/test_run.py::"
            "test_a_signal_to_one_process_stops_all_and_any_number_resumes",
            "tests/distributed/test_shards.py::"
            "test_each_process_writes_its_shards_and_replicated_tensors_are_written_once",
        ),
        "Skipping the wrong rows at the second resume, or training nothing when resuming at "
        "the end of an epoch": (
            "tests/training/test_resume.py::"
            "test_a_run_is_resumed_several_times_also_where_an_epoch_ends",
            "tests/training/test_resume.py::test_a_killed_run_ends_as_an_undisturbed_one",
        ),
        "After a change of the dataset, skipping as many rows of the new one as were trained on in "
        "the old one": (
            "tests/training/test_resume_changed.py::"
            "test_changed_rows_are_refused_with_the_difference",
        ),
        "Reading the step from the name of a file or of a parent folder": (
            "tests/training/test_resume.py::test_no_number_is_read_from_a_path",
        ),
        "Silently accepting a changed setting or model": (
            "tests/training/test_resume_changed.py::"
            "test_a_changed_setting_is_refused_with_the_difference",
            "tests/training/test_resume_changed.py::"
            "test_another_model_in_the_same_place_is_noticed",
        ),
        "Reporting success for a run that trained nothing": (
            "tests/training/test_resume.py::test_a_finished_run_is_left_as_it_is",
            "tests/training/test_resume_changed.py::"
            "test_a_longer_run_has_the_learning_rates_of_its_new_length",
        ),
        "Leaving an incomplete checkpoint after a crash, or overwriting the only copy": (
            "tests/crash/test_crash.py::test_every_operation_of_a_save_may_be_the_last",
            "tests/crash/test_damage.py::"
            "test_a_damaged_file_of_the_newest_checkpoint_is_named_and_the_one_before_is_used",
        ),
        "Storing state in a pickle file": (
            "tests/runs/test_unsafe.py::test_no_module_reads_or_writes_pickles",
            "tests/runs/test_unsafe.py::test_weights_that_are_a_pickle_with_code_are_not_run",
        ),
    },
    "Reference": {
        "Cache keys that are too specific, so that every run of a sweep recomputes the values": (
            "tests/training/test_score.py::test_the_second_run_of_a_sweep_runs_no_reference",
            "tests/models/test_cache.py::test_sequences_are_found_in_whatever_company_and_layout",
        ),
        "Cache keys that are too general, so that values of another model, precision, prompt "
        "or mask are used silently": (
            "tests/models/test_cache.py::test_another_reference_or_precision_has_no_cache_hits",
            "tests/models/test_cache.py::"
            "test_values_of_another_reference_are_refused_wherever_they_turn_up",
            "tests/models/test_cache.py::"
            "test_the_same_answer_behind_another_prompt_is_another_entry",
            "tests/models/test_cache.py::test_the_mask_of_a_sequence_is_part_of_its_cache_key",
        ),
        "A cache of reference log-probabilities that raises an error, or changes the logged values, "
        "with the losses that it was built for": (
            "tests/training/test_score.py::test_a_run_whose_rows_were_scored_runs_no_reference",
            "tests/training/test_score.py::test_the_log_is_the_same_with_and_without_a_cache",
        ),
        "Storing a cache in a pickle file, or in files in which a crash or a flipped byte can change "
        "values": (
            "tests/models/test_log_prob_store.py::test_killed_again_and_again_while_it_fills",
            "tests/models/test_log_prob_store.py::test_a_flipped_byte_anywhere_is_seen_and_named",
        ),
        "Loading a reference for a loss that does not read it": (
            "tests/training/test_score.py::test_a_loss_without_a_reference_loads_none",
        ),
    },
    "Policy model": {
        "Packing that restarts position ids but does not mask attention, so that sequences attend to "
        "each other": (
            "tests/models/test_oracle.py::test_a_token_of_another_sequence_changes_nothing",
            "tests/models/test_oracle.py::test_a_prefix_tree_equals_one_by_one_in_values_and_gradients",
        ),
        "Computing log-softmax in bfloat16": (
            "tests/models/test_oracle.py::test_bfloat16_over_float32_masters_keeps_float32_logits",
        ),
        "Compiled CUDA attention that silently falls back to eager mode after a few input sizes, "
        "and then stores the full attention-score matrix or a mask of all token pairs": (
            "tests/models/test_attention.py::"
            "test_the_compiler_of_attention_has_room_for_every_size",
            "tests/models/test_attention.py::test_no_block_is_left_out_in_which_something_is_seen",
        ),
    },
}
"""Section -> mistake -> the tests that cover it."""


def page() -> str:
    """The content of the page."""
    parts = [HEAD]
    for section, mistakes in PITFALLS.items():
        parts.append(f"## {section}\n\n| mistake | tests |\n| --- | --- |")
        for mistake, tests in mistakes.items():
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            links = ", ".join(f"[{_title(file)}](../{file})" for file in files)
            parts.append(f"| {mistake} | {links} |")
        parts.append("")
    return "\n".join(parts)


def _title(file: str) -> str:
    """tests/training/test_run.py -> training/run."""
    return file.removeprefix("tests/").removesuffix(".py").replace("/test_", "/")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
