use std::time::Duration;

use kvik_memory::ledger::{DeviceSnapshot, GroupSnapshot, MemberSnapshot, Policy};
use kvik_memory::pages::PageState;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::page_map::{Cell, PageMap, PageMaps};
use super::rates::Rates;
use super::rows::{Row, RowKey, SortBy, rows};
use super::screen::{View, draw};
use super::state::{Action, Message, Mode, ScreenState};
use crate::folder::{KvcachedSegment, Reading, UnreadableLedger};
use crate::size::Limit;

const GIB: u64 = 1 << 30;

fn member(slot: usize, ipc_name: &str, used_bytes: u64, parked_bytes: u64) -> MemberSnapshot {
    MemberSnapshot {
        slot,
        ipc_name: ipc_name.to_owned(),
        label: format!("engine-{slot}"),
        is_live: true,
        pid: 4000 + slot as u64,
        generation: 1,
        held_bytes: used_bytes + parked_bytes,
        pending_bytes: 0,
        used_bytes,
        parked_bytes,
        wanted_bytes: 0,
        waiting_ms: 0,
        reclaim_bytes: 0,
        mapped_bytes: used_bytes + parked_bytes,
        unmapped_bytes: 0,
        n_waits: 0,
        waited_us: 0,
        n_denied: 0,
        page_file: None,
    }
}

fn device(budget_bytes: u64, max_bytes: Option<u64>, members: Vec<MemberSnapshot>) -> DeviceSnapshot {
    let mut names: Vec<String> = members.iter().map(|member| member.ipc_name.clone()).collect();
    names.dedup();
    let groups = names.into_iter().map(|ipc_name| {
        let own = members.iter().filter(|member| member.ipc_name == ipc_name);
        let held_bytes = own.clone().map(|member| member.held_bytes).sum::<u64>();
        GroupSnapshot {
            is_kept: false,
            policy: Policy { max_bytes, ..Policy::default() },
            revision: 1,
            n_members: own.clone().count(),
            held_bytes,
            used_bytes: own.clone().map(|member| member.used_bytes).sum(),
            parked_bytes: own.clone().map(|member| member.parked_bytes).sum(),
            wanted_bytes: own.map(|member| member.wanted_bytes).sum(),
            entitled_bytes: budget_bytes / 2,
            over_limit_bytes: held_bytes.saturating_sub(max_bytes.unwrap_or(u64::MAX)),
            ipc_name,
        }
    });
    DeviceSnapshot {
        device: "host0".to_owned(),
        budget_bytes,
        held_bytes: members.iter().map(|member| member.held_bytes).sum(),
        groups: groups.collect(),
        members,
    }
}

/// Two engines under one name, one that waits and one that is dead.
fn busy() -> Reading {
    let mut waiting = member(2, "sglang_b", GIB, 0);
    (waiting.waiting_ms, waiting.wanted_bytes) = (2500, GIB);
    let mut dead = member(3, "sglang_b", GIB / 2, GIB / 2);
    dead.is_live = false;
    let mut waited = member(1, "vllm_a", 3 * GIB / 2, GIB / 2);
    (waited.n_waits, waited.waited_us) = (4, 48_000);
    Reading {
        devices: vec![device(
            8 * GIB,
            Some(6 * GIB),
            vec![member(0, "vllm_a", GIB, GIB), waited, waiting, dead],
        )],
        ..Reading::default()
    }
}

fn keys(reading: &Reading, sort_by: SortBy) -> Vec<RowKey> {
    rows(reading, &Rates::default(), sort_by).iter().filter_map(Row::key).collect()
}

/// The state with `n_down` lines below the first one selected.
fn state(reading: &Reading, n_down: usize) -> ScreenState {
    let mut state = ScreenState::default();
    let keys = keys(reading, SortBy::Name);
    state.keep_selection(&keys);
    for _ in 0..n_down {
        press(&mut state, KeyCode::Down, &keys);
    }
    state
}

fn press(state: &mut ScreenState, code: KeyCode, keys: &[RowKey]) -> Action {
    state.on_key(KeyEvent::new(code, KeyModifiers::NONE), keys)
}

fn shot(width: u16, height: u16, reading: &Reading, state: &ScreenState, pages: Option<&PageMap>) -> String {
    let mut before = reading.clone();
    for member in before.devices.iter_mut().flat_map(|device| &mut device.members) {
        member.mapped_bytes /= 2;
    }
    let rates = Rates::between(&before, reading, Duration::from_secs(2));
    let view = View { dir: "/dev/shm", refresh_s: 1.0, reading, rates: &rates, state, pages, engines: &[] };
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(&view, frame.area(), frame.buffer_mut())).unwrap();
    terminal.backend().to_string()
}

#[test]
fn the_engines_of_a_controller_are_at_the_bottom_and_take_a_third_at_most() {
    let (reading, rates, state) = (busy(), Rates::default(), ScreenState::default());
    let engines: Vec<_> =
        (0..30).map(|number| super::engines::tests::engine(&format!("m{number}"), "ready")).collect();
    let view = View {
        dir: "/dev/shm",
        refresh_s: 1.0,
        reading: &reading,
        rates: &rates,
        state: &state,
        pages: None,
        engines: &engines,
    };
    let mut terminal = Terminal::new(TestBackend::new(90, 24)).unwrap();
    terminal.draw(|frame| draw(&view, frame.area(), frame.buffer_mut())).unwrap();
    let screen = terminal.backend().to_string();
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines[15].contains("model") && lines[15].contains("STATE"), "{screen}");
    assert!(lines[16].contains(" m0 ") && lines[22].contains(" m6 "), "{screen}");
    assert!(lines[23].contains("q quit") && screen.contains("vllm_a"), "{screen}");
}

#[test]
fn the_pages_of_a_line_are_the_bytes_that_it_counts() {
    let reading = busy();
    let page_bytes = GIB / 4;
    let map = |member: &MemberSnapshot| {
        let n = |n_bytes: u64| (n_bytes / page_bytes) as usize;
        let mut states = vec![PageState::Used; n(member.used_bytes)];
        states.extend(vec![PageState::Parked; n(member.parked_bytes)]);
        states.push(PageState::Unmapped);
        PageMap::new(states, page_bytes)
    };
    let device = &reading.devices[0];
    let key = |member: &MemberSnapshot| RowKey {
        device: device.device.clone(),
        ipc_name: member.ipc_name.clone(),
        slot: Some(member.slot),
    };
    let maps = PageMaps::new(device.members.iter().map(|member| (key(member), map(member))).collect());
    let rates = Rates::default();
    for row in rows(&reading, &rates, SortBy::Name) {
        let (used_bytes, parked_bytes) = match row {
            Row::Group { group, .. } => (group.used_bytes, group.parked_bytes),
            Row::Member { member, .. } => (member.used_bytes, member.parked_bytes),
            _ => continue,
        };
        let pages = maps.of(&row.key().unwrap()).unwrap();
        let counts = pages.counts();
        assert_eq!(counts.n_used * pages.page_cost_bytes(), used_bytes, "{row:?}");
        assert_eq!(counts.n_parked * pages.page_cost_bytes(), parked_bytes, "{row:?}");
    }
}

fn pages() -> PageMap {
    let mut states = vec![PageState::Unmapped; 1000];
    states[..300].fill(PageState::Used);
    states[300..360].fill(PageState::Parked);
    states[500] = PageState::Quarantined;
    PageMap::new(states, 64 << 20)
}

#[test]
fn screen_80x24() {
    let reading = busy();
    insta::assert_snapshot!(shot(80, 24, &reading, &state(&reading, 4), Some(&pages())));
}

#[test]
fn screen_120x40() {
    let reading = busy();
    insta::assert_snapshot!(shot(120, 40, &reading, &state(&reading, 1), Some(&pages())));
}

#[test]
fn screen_40x12() {
    let reading = busy();
    insta::assert_snapshot!(shot(40, 12, &reading, &state(&reading, 0), Some(&pages())));
}

#[test]
fn screen_without_engines() {
    let reading = Reading { devices: vec![device(8 * GIB, None, Vec::new())], ..Reading::default() };
    insta::assert_snapshot!(shot(80, 6, &reading, &ScreenState::default(), None));
}

#[test]
fn screen_without_a_ledger() {
    insta::assert_snapshot!(shot(80, 6, &Reading::default(), &ScreenState::default(), None));
}

#[test]
fn screen_with_others() {
    let reading = Reading {
        kvcached: vec![KvcachedSegment {
            ipc_name: "kvcached_vLLM_12345".to_owned(),
            limit_bytes: 8 * GIB,
            used_bytes: 5 * GIB / 2,
            parked_bytes: GIB,
        }],
        unreadable: vec![UnreadableLedger { device: "host1".to_owned(), reason: "version 9".to_owned() }],
        ..Reading::default()
    };
    insta::assert_snapshot!(shot(80, 8, &reading, &ScreenState::default(), None));
}

#[test]
fn screen_with_help() {
    let state = ScreenState { mode: Mode::Help, ..ScreenState::default() };
    insta::assert_snapshot!(shot(80, 24, &busy(), &state, None));
}

#[test]
fn the_selected_one_of_many_engines_is_in_sight() {
    let members = (0..50).map(|slot| member(slot, &format!("engine_{slot:02}"), GIB / 16, 0)).collect();
    let reading = Reading { devices: vec![device(8 * GIB, None, members)], ..Reading::default() };
    let shot = shot(80, 24, &reading, &state(&reading, 60), None);
    assert!(shot.contains(">engine_30"), "{shot}");
    assert!(!shot.contains("engine_00"), "{shot}");
    insta::assert_snapshot!(shot);
}

#[test]
fn a_screen_of_any_size_is_drawn() {
    let reading = busy();
    for width in 1..130 {
        for height in [1, 2, 3, 4, 5, 19, 20, 21, 40] {
            shot(width, height, &reading, &state(&reading, 6), Some(&pages()));
        }
    }
}

#[test]
fn bytes_of_members_that_lie_are_drawn() {
    let mut liar = member(0, "liar", u64::MAX, 0);
    liar.parked_bytes = u64::MAX;
    liar.waiting_ms = u64::MAX;
    liar.label = "\u{4e2d}".repeat(30);
    let reading = Reading { devices: vec![device(0, None, vec![liar])], ..Reading::default() };
    for width in [1, 20, 80] {
        shot(width, 24, &reading, &state(&reading, 1), None);
    }
}

#[test]
fn groups_are_sorted_by_what_was_chosen() {
    let mut state = state(&busy(), 0);
    let first = |sort_by| keys(&busy(), sort_by)[0].ipc_name.clone();
    assert_eq!(first(SortBy::Name), "sglang_b");
    assert_eq!(first(SortBy::Used), "vllm_a");
    assert_eq!(first(SortBy::Wait), "sglang_b");
    for sort_by in [SortBy::Used, SortBy::Limit, SortBy::Wait, SortBy::Name] {
        press(&mut state, KeyCode::Char('s'), &[]);
        assert_eq!(state.sort_by, sort_by);
    }
}

#[test]
fn a_limit_is_typed_and_set_for_the_selected_group() {
    let keys = keys(&busy(), SortBy::Name);
    let mut state = state(&busy(), 1);
    assert_eq!(state.selected.as_ref().unwrap().slot, Some(2));
    for code in "l20x".chars().map(KeyCode::Char).chain([KeyCode::Backspace, KeyCode::Char('G')]) {
        assert_eq!(press(&mut state, code, &keys), Action::None);
    }
    assert!(shot(60, 24, &busy(), &state, None).contains("limit of sglang_b (such as 20G; none; Esc): 20G_"));
    let group = keys[0].clone();
    let limit = Limit::Bytes(20 * GIB);
    assert_eq!(press(&mut state, KeyCode::Enter, &keys), Action::SetLimit { group, limit });
    assert_eq!(state.mode, Mode::Normal);
}

#[test]
fn a_limit_that_is_none_is_refused_and_nothing_is_set() {
    let mut state = state(&busy(), 0);
    for code in "lq".chars().map(KeyCode::Char) {
        press(&mut state, code, &[]);
    }
    assert_eq!(press(&mut state, KeyCode::Enter, &[]), Action::None);
    assert!(state.message.as_ref().is_some_and(|message| message.is_error && message.text.contains("`q`")));
    press(&mut state, KeyCode::Char('l'), &[]);
    assert_eq!(press(&mut state, KeyCode::Esc, &[]), Action::None);
    assert_eq!(state.mode, Mode::Normal);
}

#[test]
fn keys_trim_clean_up_and_quit() {
    let keys = keys(&busy(), SortBy::Name);
    let mut state = state(&busy(), 1);
    let group = keys[0].clone();
    assert_eq!(press(&mut state, KeyCode::Char('t'), &keys), Action::Trim { group });
    assert_eq!(press(&mut state, KeyCode::Char('g'), &keys), Action::CleanUp);
    assert_eq!(press(&mut state, KeyCode::Char('?'), &keys), Action::None);
    // Any key leaves the help, also the one that would quit.
    assert_eq!(press(&mut state, KeyCode::Char('q'), &keys), Action::None);
    assert_eq!(press(&mut state, KeyCode::Char('q'), &keys), Action::Quit);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(ScreenState::default().on_key(interrupt, &[]), Action::Quit);
    let mut nothing = ScreenState::default();
    assert_eq!(press(&mut nothing, KeyCode::Char('t'), &[]), Action::None);
    assert_eq!(nothing.message, Some(Message::error("no IPC name is selected")));
}

#[test]
fn the_selection_falls_back_to_the_group_of_a_member_that_went() {
    let mut state = state(&busy(), 5);
    assert_eq!(
        state.selected.as_ref().map(|key| (key.ipc_name.as_str(), key.slot)),
        Some(("vllm_a", Some(1)))
    );
    let mut reading = busy();
    reading.devices[0].members.retain(|member| member.slot != 1);
    state.keep_selection(&keys(&reading, SortBy::Name));
    assert_eq!(state.selected.as_ref().map(|key| (key.ipc_name.as_str(), key.slot)), Some(("vllm_a", None)));
    state.keep_selection(&[]);
    assert_eq!(state.selected, None);
}

#[test]
fn rates_are_of_one_engine_and_not_of_its_successor_in_the_slot() {
    let before = busy();
    let mut after = busy();
    after.devices[0].members[0].mapped_bytes += 10;
    after.devices[0].members[0].unmapped_bytes += 4;
    after.devices[0].members[1].mapped_bytes += 10;
    after.devices[0].members[1].generation += 1;
    let rates = Rates::between(&before, &after, Duration::from_secs(2));
    let rate = |index: usize| {
        let rate = rates.of("host0", &after.devices[0].members[index]);
        (rate.map_bytes_per_s, rate.unmap_bytes_per_s)
    };
    assert_eq!((rate(0), rate(1)), ((5.0, 2.0), (0.0, 0.0)));
}

#[test]
fn a_cell_of_several_pages_says_the_worst() {
    use PageState::{Parked, Quarantined, Unmapped, Used};
    let map = PageMap::new(
        vec![Used, Used, Used, Parked, Parked, Unmapped, Unmapped, Unmapped, Used, Quarantined],
        2 << 20,
    );
    let cells: Vec<Cell> = map.cells(5).collect();
    assert_eq!(cells, [Cell::Used, Cell::PartlyUsed, Cell::Parked, Cell::Unmapped, Cell::Quarantined]);
    assert_eq!((map.pages_per_cell(100), map.cells(100).count(), map.cells(0).count()), (1, 10, 1));
}
