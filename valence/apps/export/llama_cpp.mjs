// Runs a GGUF file through llama.cpp: `node llama_cpp.mjs REQUEST.json`.
//
// The request names the module of node-llama-cpp, the model, prompts, and the folder for the results. Each prompt has
// messages (rendered with the template of the file) or a text, and the token ids that logits are computed for. Results
// are one JSON file, and one file of float32 logits [positions, vocabulary] per prompt.
import { readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const request = JSON.parse(await readFile(process.argv[2], "utf8"));
const { getLlama } = await import(pathToFileURL(request.module).href);
const llama = await getLlama({ build: "never", gpu: false, progressLogs: false, logLevel: "warn",
    logger: (level, message) => process.stderr.write(`${message}\n`) });
process.stdout.write("0\n");
const model = await llama.loadModel({ modelPath: request.model, useMmap: true });
const tokenizer = model.fileInfo.metadata.tokenizer ?? {};
const addsBos = model.tokens.shouldPrependBosToken;
const bos = addsBos || tokenizer.ggml?.bos_token_id != null ? model.tokens.bosString : "";
const package_ = JSON.parse(await readFile(join(dirname(dirname(request.module)), "package.json"), "utf8"));

function render(prompt) {
    if (prompt.messages == null)
        return { text: prompt.text, ids: [...(addsBos ? [model.tokens.bos] : []), ...model.tokenize(prompt.text, true)] };
    const template = new llama._bindings.AddonJinjaRenderer(tokenizer.chat_template ?? "");
    const text = template.render({ bos_token: bos, eos_token: model.tokens.eosString ?? "", add_generation_prompt: true,
        tools: null, ...request.variables, messages: prompt.messages });
    // llama-server removes a BOS that the template prints if the tokenizer adds one as well.
    const start = addsBos && bos && text.startsWith(bos) ? bos.length : 0;
    return { text, ids: [...(addsBos ? [model.tokens.bos] : []), ...model.tokenize(text.slice(start), true)] };
}

const context = await model.createContext({ contextSize: request.context, sequences: 1, flashAttention: false, swaFullCache: true,
    batchSize: Math.min(request.context, 512), threads: request.threads });
const sequence = context.getSequence();

async function logits(prompt, path) {
    await sequence.clearHistory();
    const ids = [...prompt.prompt_ids, ...prompt.completion_ids];
    const first = prompt.prompt_ids.length - 1;
    const items = ids.slice(0, -1).map((id, i) => (i < first ? id : [id, { generateNext: { logits: true } }]));
    const results = await sequence.controlledEvaluate(items);
    const size = request.vocabulary;
    const values = new Float32Array(size * prompt.completion_ids.length).fill(NaN);
    for (let i = first; i < items.length; i++)
        for (const [token, logit] of results[i].next.logits)
            if (token < size)
                values[(i - first) * size + token] = logit;
    await writeFile(path, values);
}

async function generate(ids) {
    await sequence.clearHistory();
    const completion = [];
    for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
        completion.push(token);
        if (model.isEogToken(token))
            return { completion, stop: "stop" };
        if (completion.length >= request.max_new_tokens)
            break;
    }
    return { completion, stop: "length" };
}

const prompts = [];
for (const [i, prompt] of request.prompts.entries()) {
    const result = { error: null, text: null, ids: null, completion: [], stop: null };
    try {
        Object.assign(result, render(prompt));
    } catch (error) {
        result.error = String(error.message ?? error);
    }
    await logits(prompt, join(request.out, `${i}.f32`));
    if (result.ids != null)
        Object.assign(result, await generate(result.ids));
    prompts.push(result);
    process.stdout.write(`${i + 1}\n`);
}
await writeFile(join(request.out, "result.json"), JSON.stringify({
    version: package_.version, release: llama.llamaCppRelease?.release ?? null, adds_bos: addsBos,
    bos: model.tokens.bos, eog: request.ends.map((id) => model.isEogToken(id)), prompts,
    other_eog: Array.from({ length: request.vocabulary }, (_, id) => id)
        .filter((id) => model.isEogToken(id) && !request.ends.includes(id)),
}));
await model.dispose();
process.exit(0);
