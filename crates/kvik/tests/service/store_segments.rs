//! Segments in the store of a daemon, with workers and daemon as processes.

use serde_json::{Value, json};

use crate::cluster::Role;
use crate::http;
use crate::process::eventually;
use crate::store::kvctl;
use crate::store_daemon::{Daemon, start_worker};

const NOTES: [&str; 3] = [
    "Note 1: In Quarry there is a builder named Olga. Olga has a striped chair, and it is in the forest.\n",
    "Note 2: Zajoda keeps a white boat in the tent. Zajoda lives in Wexley and works as a gardener.\n",
    "Note 3: Felix is a fisher. The home of Felix is in Farrow. The grey boat in the cellar is owned by Felix.\n",
];

/// The likeliest tokens after the notes in an order, and what became of the prompt.
#[track_caller]
fn blended(worker: &Role, order: [usize; 3]) -> (Value, Value) {
    let notes = order.iter().map(|idx| json!({"text": NOTES[*idx], "reusable": true}));
    let question = json!({"text": "Question: What is the job of Zajoda?\nAnswer:"});
    let segments: Vec<Value> = notes.chain([question]).collect();
    let kvik = json!({"segments": segments, "blend": "first:2"});
    let body = json!({"prompt": "", "max_tokens": 8, "temperature": 0, "logprobs": 3, "kvik": kvik});
    let mut answer = http::send(&worker.client.address, "POST", "/v1/completions", Some(&body)).unwrap();
    let text = answer.text().unwrap();
    assert_eq!(answer.status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    (answer["choices"].clone(), answer["usage"]["prompt_tokens_details"].clone())
}

#[test]
fn workers_of_a_daemon_share_segments_and_compute_them_while_it_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = format!("{}:64MiB", folder.path().join("nvme").display());
    let mut daemon = Daemon::start(folder.path(), &["--nvme", &nvme]);
    let (first, second) = (start_worker(folder.path(), &[]), start_worker(folder.path(), &[]));
    let files: Vec<String> = (0..NOTES.len())
        .map(|idx| {
            let path = folder.path().join(format!("note-{idx}.txt"));
            std::fs::write(&path, NOTES[idx]).unwrap();
            path.display().to_string()
        })
        .collect();
    let add = |worker: &Role| {
        let arguments: Vec<&str> = ["add"].into_iter().chain(files.iter().map(String::as_str)).collect();
        kvctl(&worker.client, &arguments)
    };
    let counts = |added: &Value| (added["computed_segments"].clone(), added["present_segments"].clone());
    assert_eq!(counts(&add(&first).unwrap()), (json!(3), json!(0)));
    daemon.wait_for_chunks(3);
    assert_eq!(counts(&add(&second).unwrap()), (json!(0), json!(3)), "the first one's");

    // Loaded by one worker, and computed by the other: the same tokens with the same probabilities.
    let loaded = blended(&second, [2, 0, 1]);
    assert!(loaded.1["blended_tokens"].as_u64().unwrap() > 60, "{}", loaded.1);
    assert_eq!((&loaded.1["blend"], &loaded.1["cached_tokens"]), (&json!("first:2"), &json!(0)));
    assert_eq!(blended(&first, [2, 0, 1]), loaded);
    assert_eq!(daemon.metric("kvik_store_stored_chunks_total"), 3, "no blended KV is stored");
    // Nothing of it is told to an index, or found as a prefix.
    for worker in [&first, &second] {
        let listed = http::get_json(&worker.client.address, "/kv/blocks?group=1").unwrap();
        assert_eq!(listed["blocks"], json!([]), "{listed}");
        let prompt: String = NOTES.concat();
        let lookup = kvctl(&worker.client, &["lookup", "--prompt", &prompt]).unwrap();
        assert_eq!(lookup["cached_tokens"], 0, "{lookup}");
    }
    eventually("the segments are on the disk", || {
        (daemon.metric("kvik_store_written_chunks_nvme_total") >= 3).then_some(())
    });

    daemon.process.kill();
    assert_eq!(blended(&first, [2, 0, 1]), loaded, "without the daemon");
    eventually("the worker knows that the daemon is away", || add(&first).is_err().then_some(()));
    let refused = add(&first).unwrap_err();
    assert!(refused.contains("503") && refused.contains("the store daemon is away"), "{refused}");
    let daemon = Daemon::start(folder.path(), &["--nvme", &nvme]);
    eventually("both workers attached again", || (daemon.metric("kvik_node_sessions") == 6).then_some(()));
    assert_eq!(counts(&add(&second).unwrap()), (json!(0), json!(3)), "the disk outlived the daemon");
    assert_eq!(blended(&second, [2, 0, 1]), loaded);
    assert_eq!(daemon.metric("kvik_node_corrupt_chunks_total"), 0);
}
