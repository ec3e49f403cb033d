//! `kvik bench`: measurements with a progress bar, as a table or as JSON.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvik_bench::replay::Policy;
use kvik_bench::sim::{Trace, synthetic::Chats};

use super::{check_kv_blocks, default_kv_dtype, find_model, open_model, print_json};
use crate::cli::bench::{
    BenchBlendArguments, BenchCodecArguments, BenchEdgesArguments, BenchEngineArguments, BenchEppArguments,
    BenchGatewayArguments, BenchIndexArguments, BenchMemoryArguments, BenchMemoryPeerArguments,
    BenchMovingArguments, BenchNodeArguments, BenchNodeClientArguments, BenchPlannerArguments,
    BenchRoutingArguments, BenchSharingArguments, BenchStoreArguments,
};
use crate::scratch::ScratchFolder;
use kvik_bench::blend::{self, BlendBench};
use kvik_bench::codec::{self, CodecBench};
use kvik_bench::edges::{Attack, EdgesBench, EdgesBenchOptions};
use kvik_bench::engine::{EngineBench, EngineBenchOptions};
use kvik_bench::epp::{EppBench, EppBenchOptions, Size};
use kvik_bench::gateway::{GatewayBench, GatewayBenchOptions, Kind};
use kvik_bench::index::{self, IndexBench};
use kvik_bench::machine::Machine;
use kvik_bench::memory::{self, MemoryBench, MemoryBenchOptions};
use kvik_bench::moving::{MovingBench, MovingBenchOptions};
use kvik_bench::node::{self, NodeBench, NodeBenchOptions};
use kvik_bench::planner::{self, PlannerBench, PlannerBenchOptions};
use kvik_bench::report::Report;
use kvik_bench::routing::{self, RoutingBench, RoutingBenchOptions};
use kvik_bench::sharing::{SharingBench, SharingBenchOptions};
use kvik_bench::store::{self, StoreBench, StoreBenchOptions};
use kvik_model::DeviceName;
use kvik_runtime::machine;
use kvik_runtime::terminal;
use kvik_types::Dtype;

/// Runs `kvik bench engine`.
pub(crate) fn engine(arguments: &BenchEngineArguments) -> anyhow::Result<()> {
    let model = open_model(arguments.model.as_deref())?;
    let options = EngineBenchOptions {
        batch_sizes: arguments.batch.iter().map(|&size| size as usize).collect(),
        prefill_tokens: arguments.prefill_tokens as usize,
        decode_tokens: arguments.decode_tokens as usize,
        context_tokens: arguments.context as usize,
        at_least: Duration::from_secs(arguments.seconds),
        device: arguments.device,
        kv_dtype: arguments.kv_dtype.map_or_else(|| default_kv_dtype(arguments.device), Dtype::from),
        n_threads: arguments.threads.map_or_else(machine::n_cores, |n| n as usize),
    };
    options.validate(model.config()).context("read the options")?;
    if options.device == DeviceName::Cpu {
        check_kv_blocks(model.config(), options.kv_dtype, options.n_blocks())
            .context("make room for the batch")?;
    }

    let mut bench = EngineBench::try_new(&model, options).context("load the model")?;
    let progress = progress_bar(bench.n_measurements());
    let mut results = Vec::new();
    while let Some(name) = bench.next_name() {
        progress.set_message(name.clone());
        results.extend(bench.measure_next().with_context(|| format!("measure {name}"))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "engine",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench gateway`.
pub(crate) fn gateway(arguments: &BenchGatewayArguments) -> anyhow::Result<()> {
    let requests = if arguments.quick { arguments.requests.div_ceil(20) } else { arguments.requests };
    let options = GatewayBenchOptions { memory_requests: requests as usize, is_quick: arguments.quick };
    let bench = GatewayBench::try_new(options)?;
    let progress = progress_bar(Kind::ALL.len());
    let mut results = Vec::new();
    for kind in Kind::ALL {
        let name = bench.name(kind);
        progress.set_message(name.clone());
        results.extend(bench.measure(kind).with_context(|| format!("measure {name}"))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "gateway",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    bench.finish();
    print(&report, arguments.json)
}

/// Runs `kvik bench epp`.
pub(crate) fn epp(arguments: &BenchEppArguments) -> anyhow::Result<()> {
    let bench = EppBench::try_new(EppBenchOptions { is_quick: arguments.quick })?;
    let progress = progress_bar(Size::ALL.len());
    let mut results = Vec::new();
    for size in Size::ALL {
        progress.set_message(size.name());
        results.extend(bench.measure(size).with_context(|| format!("measure bodies of {}", size.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "epp",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    bench.finish();
    print(&report, arguments.json)
}

/// Runs `kvik bench edges`.
pub(crate) fn edges(arguments: &BenchEdgesArguments) -> anyhow::Result<()> {
    let progress = progress_bar(1 + Attack::ALL.len());
    progress.set_message("before");
    let bench = EdgesBench::try_new(EdgesBenchOptions { is_quick: arguments.quick })?;
    progress.inc(1);
    let mut results = bench.before();
    for attack in Attack::ALL {
        progress.set_message(attack.name());
        results.extend(bench.measure(attack).with_context(|| format!("attack with {}", attack.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "edges",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    bench.finish();
    print(&report, arguments.json)
}

/// Runs `kvik bench moving`.
pub(crate) fn moving(arguments: &BenchMovingArguments) -> anyhow::Result<()> {
    let scratch = ScratchFolder::create("moving", false).context("make a folder for the model")?;
    let mut bench = MovingBench::try_new(MovingBenchOptions {
        program: std::env::current_exe().context("find this program")?,
        folder: scratch.path().to_owned(),
        device: arguments.device,
        is_quick: arguments.quick,
        rolling: arguments.rolling.map(Duration::from_secs),
    })?;
    let kinds = bench.kinds();
    let progress = progress_bar(kinds.len());
    let mut results = Vec::new();
    for kind in kinds {
        progress.set_message(kind.name());
        results.extend(bench.measure(kind).with_context(|| format!("measure {}", kind.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "moving",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench sharing`.
pub(crate) fn sharing(arguments: &BenchSharingArguments) -> anyhow::Result<()> {
    let model = arguments.model.as_deref().map(find_model).transpose()?;
    let scratch = ScratchFolder::create("sharing", false).context("make a folder for the ledger")?;
    let mut bench = SharingBench::try_new(SharingBenchOptions {
        program: std::env::current_exe().context("find this program")?,
        folder: scratch.path().to_owned(),
        model: model.map(|model| model.folder),
        device: arguments.device,
        is_quick: arguments.quick,
    })?;
    let progress = progress_bar(bench.n_steps());
    let results = bench.measure(|step| {
        progress.inc(u64::from(!progress.message().is_empty()));
        progress.set_message(step);
    })?;
    progress.finish_and_clear();

    let report = Report {
        bench: "sharing",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench memory`.
pub(crate) fn memory(arguments: &BenchMemoryArguments) -> anyhow::Result<()> {
    let options = MemoryBenchOptions { device: arguments.device, is_quick: arguments.quick };
    let bench = MemoryBench::try_new(options).context("open the device")?;
    let progress = progress_bar(memory::Kind::ALL.len());
    let mut results = Vec::new();
    for kind in memory::Kind::ALL {
        progress.set_message(kind.name());
        results.extend(bench.measure(kind).with_context(|| format!("measure {}", kind.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "memory",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench node`.
pub(crate) fn node(arguments: &BenchNodeArguments) -> anyhow::Result<()> {
    let bench = NodeBench::try_new(NodeBenchOptions {
        is_quick: arguments.quick,
        n_threads: usize::from(arguments.threads),
    })?;
    let progress = progress_bar(node::Kind::ALL.len());
    let mut results = Vec::new();
    for kind in node::Kind::ALL {
        progress.set_message(kind.name());
        results.extend(bench.measure(kind).with_context(|| format!("measure {}", kind.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "node",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs a client process of `kvik bench node`.
pub(crate) fn node_client(arguments: &BenchNodeClientArguments) -> anyhow::Result<()> {
    node::serve_client(&arguments.socket, arguments.number, arguments.n_chunks)
}

/// Runs `kvik bench store`.
pub(crate) fn store(arguments: &BenchStoreArguments) -> anyhow::Result<()> {
    let options =
        StoreBenchOptions { dir: arguments.dir.clone(), device: arguments.device, is_quick: arguments.quick };
    let bench = StoreBench::try_new(options)?;
    let progress = progress_bar(store::Kind::ALL.len());
    let mut results = Vec::new();
    for kind in store::Kind::ALL {
        progress.set_message(kind.name());
        results.extend(bench.measure(kind).with_context(|| format!("measure {}", kind.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "store",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench planner`.
pub(crate) fn planner(arguments: &BenchPlannerArguments) -> anyhow::Result<()> {
    let folder =
        ScratchFolder::create_in(&arguments.dir, "planner", false).context("make a folder for the bench")?;
    let options = PlannerBenchOptions { dir: folder.path().to_owned(), is_quick: arguments.quick };
    let bench = PlannerBench::try_new(options)?;
    let speeds = bench.speeds();
    let progress = progress_bar(speeds.len());
    let mut cells = Vec::new();
    for speed in speeds {
        progress.set_message(speed.name());
        cells.extend(bench.measure(speed).with_context(|| format!("measure {}", speed.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    if let Some(path) = &arguments.plot {
        std::fs::write(path, planner::svg(&cells))
            .with_context(|| format!("write plot {}", path.display()))?;
    }
    let report = Report {
        bench: "planner",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results: planner::measurements(&cells),
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench blend`.
pub(crate) fn blend(arguments: &BenchBlendArguments) -> anyhow::Result<()> {
    let folder =
        ScratchFolder::create_in(&arguments.dir, "blend", false).context("make a folder for the bench")?;
    let bench = BlendBench { dir: folder.path().to_owned(), is_quick: arguments.quick };
    let progress = progress_bar(blend::Kind::ALL.len());
    let mut results = Vec::new();
    for kind in blend::Kind::ALL {
        progress.set_message(kind.name());
        results.extend(bench.measure(kind).with_context(|| format!("measure {}", kind.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "blend",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench codec`.
pub(crate) fn codec(arguments: &BenchCodecArguments) -> anyhow::Result<()> {
    let bench = CodecBench { is_quick: arguments.quick };
    let progress = progress_bar(codec::Subject::ALL.len());
    let mut results = Vec::new();
    for subject in codec::Subject::ALL {
        progress.set_message(subject.name());
        results.extend(bench.measure(subject).with_context(|| format!("measure {}", subject.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "codec",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench index`.
pub(crate) fn index(arguments: &BenchIndexArguments) -> anyhow::Result<()> {
    let bench = IndexBench { is_quick: arguments.quick };
    let progress = progress_bar(index::Kind::ALL.len());
    let mut results = Vec::new();
    for kind in index::Kind::ALL {
        progress.set_message(kind.name());
        results.extend(bench.measure(kind).with_context(|| format!("measure {}", kind.name()))?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let report = Report {
        bench: "index",
        machine: Machine::detect(),
        settings: bench.settings(),
        description: bench.description(),
        results,
    };
    print(&report, arguments.json)
}

/// Runs `kvik bench routing`.
pub(crate) fn routing(arguments: &BenchRoutingArguments) -> anyhow::Result<()> {
    let trace = match &arguments.trace {
        Some(path) => read_trace(path)?,
        None => GENERATED_CHATS.trace().context("generate conversations")?,
    };
    let trace_name = match &arguments.trace {
        Some(path) => path.display().to_string(),
        None => "generated conversations".to_owned(),
    };
    let loads: Vec<f64> = arguments.load.iter().map(|&percent| f64::from(percent) / 100.0).collect();
    let progress = progress_bar((1 + loads.len()) * Policy::ALL.len());
    let step = |policy: Policy| {
        progress.set_message(policy.name());
        progress.inc(1);
    };
    let options = RoutingBenchOptions {
        trace_name,
        cache_blocks: arguments.cache_blocks,
        load_factor: arguments.load_factor,
        loads,
    };
    let bench = RoutingBench::try_new(options, &trace, step)?;
    let cells = bench.measure(step)?;
    let affinity = bench.affinity()?;
    progress.finish_and_clear();

    if let Some(path) = &arguments.plot {
        std::fs::write(path, routing::svg(&cells))
            .with_context(|| format!("write plot {}", path.display()))?;
    }
    if arguments.json {
        return print_json(&Report {
            bench: "routing",
            machine: Machine::detect(),
            settings: bench.settings(),
            description: bench.description(),
            results: [routing::measurements(&cells), routing::affinity_measurements(&affinity)].concat(),
        });
    }
    let mut stdout = anstream::stdout().lock();
    routing::write_table(&cells, &bench.description(), &mut stdout)
        .and_then(|()| routing::write_affinity(&affinity, &mut stdout))
        .and_then(|()| stdout.flush())
        .context("write to standard output")
}

/// Runs the other process of `kvik bench memory`.
pub(crate) fn memory_peer(arguments: &BenchMemoryPeerArguments) -> anyhow::Result<()> {
    memory::run_peer(&arguments.folder, &arguments.device).context("take part in the measurement")
}

/// What is replayed without a trace: conversations of five turns in the mean on one system prompt.
const GENERATED_CHATS: Chats = Chats { n_requests: 6000, rate: 3.0, think_s: 30.0, next_turn: 0.8, seed: 1 };

fn read_trace(path: &Path) -> anyhow::Result<Trace> {
    let file = File::open(path).with_context(|| format!("open trace {}", path.display()))?;
    Trace::read(BufReader::new(file)).with_context(|| format!("read trace {}", path.display()))
}

fn print(report: &Report, is_json: bool) -> anyhow::Result<()> {
    if is_json {
        return print_json(report);
    }
    let mut stdout = anstream::stdout().lock();
    report.write_table(&mut stdout).and_then(|()| stdout.flush()).context("write to standard output")
}

/// A bar on standard error that shows itself only on a terminal.
pub(super) fn progress_bar(n_measurements: usize) -> ProgressBar {
    if !terminal::stderr_is_terminal() {
        return ProgressBar::hidden();
    }
    let progress = ProgressBar::with_draw_target(Some(n_measurements as u64), ProgressDrawTarget::stderr());
    // The built-in style is as good if the template should ever be wrong.
    if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} {elapsed}") {
        progress.set_style(style);
    }
    progress.enable_steady_tick(Duration::from_millis(200));
    progress
}
