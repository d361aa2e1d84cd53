//! The project's goldens: all are read, and a walk over them finds what is right and what is wrong.

use headway_testkit::golden::{
    self, TinyGolden,
    check::Compute,
    walk::{Generated, Generates, Prompt, Table, Tokenizes, all_tiny, prompts, real, tiny, tokenizer},
};

/// Answers with what the goldens say, but for a change to the k-th id or logit.
struct Parrot {
    answers: Vec<(Vec<u32>, Generated)>,
    change: fn(&mut Generated),
}

impl Parrot {
    fn of(golden: &TinyGolden, change: fn(&mut Generated)) -> Self {
        let answer = |c: &golden::TinyCase| Generated {
            first_logits: c.logits.iter().map(|&x| x as f32).collect(),
            ids: c.greedy_ids.clone(),
        };
        let answers = golden.cases.iter().map(|c| (c.prompt_ids.clone(), answer(c))).collect();
        Self { answers, change }
    }
}

impl Generates for Parrot {
    fn run(&mut self, prompt: Prompt<'_>) -> Result<Generated, String> {
        let known = self.answers.iter().find(|(ids, _)| ids == prompt.ids).ok_or("an unknown prompt")?;
        let mut g = known.1.clone();
        g.ids.truncate(prompt.max_new);
        (self.change)(&mut g);
        Ok(g)
    }

    fn run_batch(&mut self, prompts: &[Prompt<'_>]) -> Result<Vec<Generated>, String> {
        prompts.iter().map(|p| self.run(*p)).collect()
    }
}

#[test]
fn every_golden_of_the_project_is_read() {
    let (t, r, k) = (golden::tiny().unwrap(), golden::real().unwrap(), golden::tokenizers().unwrap());
    assert!(t.len() >= 9 && r.len() >= 3 && k.len() >= 5, "{} {} {}", t.len(), r.len(), k.len());
    for g in &t {
        assert!(g.cases.len() >= 6, "{}", g.model.name);
        for c in &g.cases {
            assert_eq!(c.logits.len(), g.model.vocab_size);
            assert_eq!((c.greedy_ids.len(), c.greedy_margins.len()), (24, 24));
            assert!(c.greedy_margins.iter().all(|&m| m >= 0.02), "{} {}", g.model.name, c.name);
        }
    }
    assert!(r.iter().all(|g| g.cases.iter().all(|c| c.text.is_some() != c.messages.is_some())));
}

#[test]
fn a_walk_passes_what_is_right_and_counts_what_is_not_known() {
    let table = all_tiny(Compute::Float32, "f32", |g, dir| {
        assert!(dir.join("config.json").is_file());
        Ok((g.model.architecture != "Olmo2ForCausalLM")
            .then(|| Box::new(Parrot::of(g, |_| ())) as Box<dyn Generates>))
    })
    .unwrap();
    assert!(table.ok(), "{table}");
    assert!(
        table.rows.len() >= 16 && table.rows.iter().all(|r| r.cases == r.passed && r.ids == 24 * r.cases)
    );
    assert!(table.not_run.iter().any(|n| n.starts_with("tiny-olmo2: Olmo2ForCausalLM")), "{table}");
    println!("{table}");
}

#[test]
fn a_walk_names_what_is_wrong() {
    let all = golden::tiny().unwrap();
    let g = all.iter().find(|g| g.model.name == "tiny-llama").unwrap();
    let walk = |compute, change| {
        let mut table = Table::default();
        tiny(&mut table, g, compute, "x", &mut Parrot::of(g, change));
        table
    };
    let wrong_id = walk(Compute::Float32, |g| g.ids[5] ^= 1);
    assert_eq!(wrong_id.failures.len(), 2 * g.cases.len());
    assert!(wrong_id.failures[0].contains("id 5 of the continuation"), "{wrong_id}");
    assert!(!walk(Compute::Float32, |g| g.first_logits[7] += 2e-3).ok());
    assert!(walk(Compute::Half, |g| g.first_logits[7] += 0.3).ok());
    assert!(!walk(Compute::Half, |g| g.first_logits[7] += 0.6).ok());
}

#[test]
fn real_cases_stop_at_small_margins() {
    let all = golden::real().unwrap();
    let g = all.iter().find(|g| g.model.name.starts_with("gemma3")).unwrap();
    struct Top<'a>(&'a golden::RealGolden);
    impl Generates for Top<'_> {
        fn run(&mut self, p: Prompt<'_>) -> Result<Generated, String> {
            let c = self.0.cases.iter().find(|c| c.prompt_ids == p.ids).ok_or("an unknown prompt")?;
            // Logits with the golden's ten largest, its sum of exponentials and no other likeness.
            let mut first_logits = vec![0.0; self.0.model.vocab_size];
            c.top10.iter().for_each(|&(id, x)| first_logits[id as usize] = x as f32);
            Ok(Generated { first_logits, ids: c.greedy_ids.clone() })
        }
        fn run_batch(&mut self, prompts: &[Prompt<'_>]) -> Result<Vec<Generated>, String> {
            prompts.iter().map(|p| self.run(*p)).collect()
        }
    }
    let mut table = Table::default();
    real(&mut table, g, Compute::Quantised, "q8", 100, &mut Top(g));
    assert!(
        table.failures.iter().any(|f| f.contains("of all logits is") || f.contains("logsumexp is")),
        "{table}"
    );
}

#[test]
fn tokenizer_walks_are_exact() {
    struct Echo<'a>(&'a golden::TokenizerGolden);
    impl Tokenizes for Echo<'_> {
        fn encode(&mut self, text: &str) -> Result<Vec<u32>, String> {
            let of_chat = self.0.chat.iter().find(|c| c.rendered == text).map(|c| c.ids.clone());
            let of_text = self.0.cases.iter().find(|c| c.text == text).map(|c| c.ids.clone());
            of_text.or(of_chat).ok_or_else(|| format!("{text:?} is not a case"))
        }
        fn decode(&mut self, ids: &[u32], skip: bool) -> Result<String, String> {
            let c = self.0.cases.iter().find(|c| c.ids == ids).ok_or("ids of no case")?;
            Ok(if skip { c.decoded_skip_special.clone() } else { c.decoded.clone() })
        }
        fn render(
            &mut self,
            m: &serde_json::Value,
            add: bool,
            template: Option<&str>,
        ) -> Result<String, String> {
            assert!(template.is_some());
            let c = self.0.chat.iter().find(|c| c.messages == *m && c.add_generation_prompt == add);
            Ok(c.ok_or("a chat of no case")?.rendered.clone())
        }
    }
    let mut table = Table::default();
    for g in golden::tokenizers().unwrap() {
        tokenizer(&mut table, &g, &mut Echo(&g));
    }
    assert!(table.ok() && table.rows.iter().all(|r| r.cases >= 100), "{table}");
    let all = golden::real().unwrap();
    let tokenizers = golden::tokenizers().unwrap();
    prompts(&mut table, &all[0], &mut Echo(&tokenizers[0]));
    assert!(!table.ok(), "prompts that the tokenizer does not know pass");
}
