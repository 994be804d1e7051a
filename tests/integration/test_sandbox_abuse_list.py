"""Which test tries what of the list of abuse: what an agent may try, to get out, to take too much, to forge a score."""

from pathlib import Path

from support.sandboxes import names_of_tests

TRIED = {
    "read the service's environment": (
        "test_trap_01_clearenv_does_not_hide_service_environment",
        "test_abuse_a_watcher_sees_nothing_of_what_starts_its_commands",
    ),
    "read the machine's files": (
        "test_abuse_no_host_files_processes_or_sockets_are_seen",
        "test_abuse_the_spool_is_not_reachable_by_the_path_that_proc_shows",
    ),
    "reach the machine's sockets": ("test_abuse_no_socket_of_the_machine_is_reached",),
    "reach another sandbox": ("test_abuse_another_sandbox_is_not_seen",),
    "mount, mknod, ptrace, kill outside": (
        "test_abuse_that_must_fail",
        "test_abuse_no_system_call_leads_out",
        "test_abuse_root_of_an_image_gets_nothing_of_the_machine",
        "test_abuse_root_of_a_container_gets_nothing_of_the_machine",
    ),
    "network": ("test_abuse_network_is_none_but_loopback_works", "test_abuse_no_socket_of_the_machine_is_reached"),
    "a network that reaches more than its list": (
        "test_escape_a_direct_connection_out_fails",
        "test_escape_the_services_own_ports_are_not_reached",
        "test_escape_a_name_is_connected_to_where_it_was_checked",
        "test_escape_a_name_that_is_not_listed_is_not_looked_up",
        "test_escape_smuggled_targets_and_lines_reach_nobody",
        "test_escape_one_request_a_connection",
        "test_escape_a_redirect_leads_only_where_the_list_does",
        "test_escape_what_is_not_plainly_a_host_is_refused",
        "test_escape_what_can_be_read_in_two_ways_is_refused",
    ),
    "symlinks and .. in paths and archives": (
        "test_abuse_no_path_leads_out",
        "test_abuse_an_archive_that_leads_out_is_refused",
        "test_links_are_never_followed_by_a_copy",
    ),
    "fork bomb": ("test_bug_18_fork_bomb_is_bounded_and_others_answer",),
    "fill the memory": (
        "test_trap_04_memory_hog_dies_and_the_sandbox_lives",
        "test_abuse_more_files_than_memory_hurt_nobody_else",
    ),
    "fill the disk": ("test_trap_04_filling_tmpfs_is_an_error_and_spares_the_sandbox", "test_row_19_the_size_is_held"),
    "2 GB of output": (
        "test_row_14_two_gigabytes_of_output_stay_out_of_memory",
        "test_abuse_output_after_the_end_is_bounded",
    ),
    "planted reward files": ("test_bug_30_planted_files_score_nothing",),
    "a process that outlives its command": (
        "test_bug_03_leftovers_end_before_the_checks",
        "test_trap_06_timeout_kills_a_child_that_left_its_session",
    ),
    "device and FIFO files": ("test_abuse_what_is_no_regular_file_is_refused_and_never_waited_for",),
    "a 200 KB argument": ("test_trap_10_a_long_command_is_no_argument",),
    "text that is not UTF-8": (
        "test_bug_11_output_that_is_not_utf8_is_replaced",
        "test_abuse_names_that_are_not_utf8_harm_nothing",
    ),
    "a jump of the clock": ("test_abuse_a_jump_of_the_clock_ends_nothing",),
}


def test_each_entry_of_the_list_is_tried() -> None:
    named = {name for names in TRIED.values() for name in names}
    assert named - names_of_tests(Path(__file__).parents[1]) == set()
